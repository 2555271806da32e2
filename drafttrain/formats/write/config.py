"""What an export is told."""

import re
from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16")
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*")  # the Hub itself checks the finer points


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Where and how an export is written, and whether it is pushed."""

    name: str
    dir: str | None
    dtype: str
    num_speculative_tokens: int
    tuned: bool
    license: str
    overwrite: bool
    push: str | None
    private: bool
    dry_run: bool

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"export.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.num_speculative_tokens < 1:
            raise ValueError(
                "export.num_speculative_tokens must be at least 1, "
                f"got {self.num_speculative_tokens}"
            )
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.license):
            raise ValueError(
                "export.license must be a licence id of the Hub, such as apache-2.0, llama3.1 or "
                f"other, got {self.license!r}"
            )
        if self.push is not None and not REPO.fullmatch(self.push):
            raise ValueError(
                f"export.push must be user/repo, got {self.push!r}; "
                "for example export.push=ada/Llama-3.1-8B-drafter"
            )
        if self.dry_run and self.push is None:
            raise ValueError(
                "export.dry_run=true must come with export.push=user/repo, got no repo: "
                "it shows what a push would upload"
            )
