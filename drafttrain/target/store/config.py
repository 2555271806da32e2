"""What a store holds, and how training reads it."""

from dataclasses import dataclass
from typing import Annotated

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Limit, Settings

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float8": "F8_E4M3"}  # safetensors' names
SMALLEST_SHARD_MB, LARGEST_SHARD_MB = 0.001, 1e6
FOLDER = Limit(
    "name the folder of a store",
    bool,
    "; as in features.dir=outputs/store, which `capture store.dir=outputs/store` makes",
)


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Settings):
    """Where training gets the target's features; this class: from the target itself, online."""

    section = "features"

    name: str
    prefetch: limits.NonNegativeInt  # steps; 0: no thread


@dataclass(frozen=True, kw_only=True)
class StoredFeaturesConfig(FeaturesConfig):
    dir: Annotated[str | None, FOLDER]
    validate: bool
    checksums: bool


@dataclass(frozen=True, kw_only=True)
class StoreConfig(Settings):
    section = "store"

    dir: str
    drafters: list[str] | None
    layers: list[int] | None
    final_hidden: bool
    dtype: Annotated[str, limits.one_of(*DTYPES)]
    shard_mb: Annotated[float, limits.between(SMALLEST_SHARD_MB, LARGEST_SHARD_MB)]
    assistant_only: bool
    verify: bool


@dataclass(frozen=True)
class StoreContents:
    """What a store keeps: layers, and how far before a trained token (None: all positions)."""

    layers: tuple[int, ...]
    reach: int | None
