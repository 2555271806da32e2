"""The settings of an export."""

import re
from dataclasses import dataclass
from typing import Annotated

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings, require

FP8 = "fp8"
DTYPES = ("auto", "float32", "bfloat16", FP8)
NATIVE, SPECULATORS_FORMAT, SGLANG_FORMAT, GGUF_FORMAT = FORMATS = (
    *("vllm", "speculators", "sglang", "gguf"),
)
AS_NATIVE = (NATIVE, SGLANG_FORMAT)  # the same files
USUAL_DEPTH = 3  # of chains, where engines may draft any number
SIZE = Limit(
    "be a number with KB, MB, GB or TB, such as 5GB",
    re.compile(r"[1-9]\d*(?:\.\d+)?[KMGT]B", re.ASCII).fullmatch,  # as huggingface_hub reads it
)
LICENSE = Limit(
    "be a licence id of the Hub, such as apache-2.0, llama3.1 or other",
    re.compile(r"[a-z0-9][a-z0-9.-]*").fullmatch,
)
USER_REPO = Limit(
    "be user/repo",
    re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*").fullmatch,  # the Hub checks the finer points
    "; for example export.push=ada/Llama-3.1-8B-drafter",
)


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """Where and how an export is written, and whether it is pushed."""

    section = "export"

    name: str
    format: Annotated[str, limits.one_of(*FORMATS)]
    dir: str | None
    converter: str | None
    dtype: Annotated[str, limits.one_of(*DTYPES)]
    max_shard_size: Annotated[str, SIZE]
    num_speculative_tokens: limits.CountOrAuto | None  # "auto" until chosen; None: see `depth`
    tensor_parallel: limits.CountOrAuto  # "auto" until it is chosen
    measured_prompts: limits.NonNegativeInt
    license: Annotated[str, LICENSE]
    overwrite: bool
    push: Annotated[str, USER_REPO] | None
    private: bool
    dry_run: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.converter is None or self.format == GGUF_FORMAT
        need = f"come with export.format={GGUF_FORMAT}"
        require(own, "export.converter", need, self.format, ": give export=gguf")
        named = not self.dry_run or self.push is not None
        need, why = "come with export.push=user/repo", ": it shows what a push would upload"
        require(named, "export.dry_run=true", need, "no repo", why)

    def depth(self, block: int | None, deepest: int | None) -> int:
        """Return how many tokens engines are told to draft: the number given, or what suits best.

        block: what a drafter drafts at once, None: any number. deepest: the most it can draft.
        """
        given: int | None = self.num_speculative_tokens
        return given or block or (USUAL_DEPTH if deepest is None else min(USUAL_DEPTH, deepest))
