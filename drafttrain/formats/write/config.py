"""The settings of an export."""

import re
from dataclasses import dataclass
from typing import Any

from drafttrain.runtime.settings import AUTO, is_count_or_auto, require

FP8 = "fp8"
DTYPES = ("auto", "float32", "bfloat16", FP8)
NATIVE, SPECULATORS_FORMAT, SGLANG_FORMAT, GGUF_FORMAT = FORMATS = (
    *("vllm", "speculators", "sglang", "gguf"),
)
AS_NATIVE = (NATIVE, SGLANG_FORMAT)  # the same files
USUAL_DEPTH = 3  # of chains, where engines may draft any number
SIZE = re.compile(r"[1-9]\d*(?:\.\d+)?[KMGT]B", re.ASCII)  # as huggingface_hub reads it
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*")  # the Hub itself checks the finer points


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Where and how an export is written, and whether it is pushed."""

    name: str
    format: str
    dir: str | None
    converter: str | None
    dtype: str
    max_shard_size: str
    num_speculative_tokens: Any  # a number, or "auto" until it is chosen; None: see `depth`
    tensor_parallel: Any  # a number, or "auto" until it is chosen
    measured_prompts: int
    license: str
    overwrite: bool
    push: str | None
    private: bool
    dry_run: bool

    def __post_init__(self) -> None:
        depth, formats = self.num_speculative_tokens, f"be one of {', '.join(FORMATS)}"
        require(self.format in FORMATS, "export.format", formats, repr(self.format))
        own = self.converter is None or self.format == GGUF_FORMAT
        need = f"come with export.format={GGUF_FORMAT}"
        require(own, "export.converter", need, self.format, ": give export=gguf")
        dtypes, known = f"be one of {', '.join(DTYPES)}", self.dtype in DTYPES
        require(known, "export.dtype", dtypes, repr(self.dtype))
        size = "be a number with KB, MB, GB or TB, such as 5GB"
        known = SIZE.fullmatch(self.max_shard_size) is not None
        require(known, "export.max_shard_size", size, repr(self.max_shard_size))
        known = depth is None or is_count_or_auto(depth)
        require(known, "export.num_speculative_tokens", "be at least 1, auto or null", depth)
        spread = self.tensor_parallel
        need = f"be at least 1, or {AUTO}"
        require(is_count_or_auto(spread), "export.tensor_parallel", need, spread)
        measured = self.measured_prompts
        require(measured >= 0, "export.measured_prompts", "be at least 0", measured)
        licence = "be a licence id of the Hub, such as apache-2.0, llama3.1 or other"
        known = re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.license) is not None
        require(known, "export.license", licence, repr(self.license))
        named = self.push is None or REPO.fullmatch(self.push) is not None
        example = "; for example export.push=ada/Llama-3.1-8B-drafter"
        require(named, "export.push", "be user/repo", repr(self.push), example)
        named = not self.dry_run or self.push is not None
        need, why = "come with export.push=user/repo", ": it shows what a push would upload"
        require(named, "export.dry_run=true", need, "no repo", why)

    def depth(self, block: int | None, deepest: int | None) -> int:
        """Return how many tokens engines are told to draft: the number given, or what suits best.

        block: what a drafter drafts at once, None: any number. deepest: the most it can draft.
        """
        given: int | None = self.num_speculative_tokens
        if given is not None:
            return given
        return block or (USUAL_DEPTH if deepest is None else min(USUAL_DEPTH, deepest))
