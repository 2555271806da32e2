"""What a store holds, and how training reads it."""

from dataclasses import dataclass

from drafttrain.runtime.settings import Settings

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float8": "F8_E4M3"}  # safetensors' names
SMALLEST_SHARD_MB, LARGEST_SHARD_MB = 0.001, 1e6


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Settings):
    """Where training gets the target's features; this class: from the target itself, online."""

    section = "features"

    name: str
    prefetch: int

    def __post_init__(self) -> None:
        self.require("prefetch", self.prefetch >= 0, "be at least 0 steps (0: no thread)")


@dataclass(frozen=True, kw_only=True)
class StoredFeaturesConfig(FeaturesConfig):
    dir: str | None
    validate: bool
    checksums: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dir:
            raise ValueError(
                f"features.dir must name the folder of a store, got {self.dir or 'null'}; as in "
                "features.dir=outputs/store, which `capture store.dir=outputs/store` makes"
            )


@dataclass(frozen=True, kw_only=True)
class StoreConfig(Settings):
    section = "store"

    dir: str
    drafters: list[str] | None
    layers: list[int] | None
    final_hidden: bool
    dtype: str
    shard_mb: float
    assistant_only: bool
    verify: bool

    def __post_init__(self) -> None:
        self.require("dtype", self.dtype in DTYPES, f"be one of {', '.join(DTYPES)}")
        inside = SMALLEST_SHARD_MB <= self.shard_mb <= LARGEST_SHARD_MB
        self.require("shard_mb", inside, f"be in [{SMALLEST_SHARD_MB}, {LARGEST_SHARD_MB:g}]")


@dataclass(frozen=True)
class StoreContents:
    """What a store keeps: layers, and how far before a trained token (None: all positions)."""

    layers: tuple[int, ...]
    reach: int | None
