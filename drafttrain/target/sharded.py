"""A target in pieces: ZeRO-3 (Rajbhandari et al., 2020, arXiv:1910.02054) over the ranks.

Each rank keeps its part of every layer; a layer is gathered when it runs, on all ranks at once, and
forgotten behind it. So every rank must run the target equally often: see `ShardedTarget.in_step`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.types import Batch, TargetFeatures, TargetSpec
from drafttrain.runtime.deepspeed import import_deepspeed, quiet
from drafttrain.runtime.ranks import Ranks
from drafttrain.target.describe import describe, gigabytes
from drafttrain.target.model import Target
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.inflate import count_parameters
from drafttrain.target.pretrained.limits import final_norm_of, limits_of
from drafttrain.target.pretrained.models import fingerprint, load_model_config, load_tokenizer
from drafttrain.target.pretrained.shards import Place, places, put, read, skeleton


def load_sharded(config: ModelConfig, dtype: torch.dtype, ranks: Ranks) -> "ShardedTarget":
    """Load a target in pieces, frozen; called by all ranks together.

    ValueError for what cannot be partitioned, and for weights that do not fit the configuration.
    """
    model_config = load_model_config(config)
    limits_of(config, model_config)
    refuse_unless_shardable(config, model_config, ranks)
    tokenizer = load_tokenizer(config)
    model = skeleton(config, model_config, dtype)
    num_parameters = count_parameters(model)
    engine = partition(config, model, ranks)
    mark = fingerprint(config, dtype, str(ranks.device))
    spec = describe(config, model_config, model.generation_config, tokenizer, mark)
    target = ShardedTarget(model, tokenizer, spec, engine, ranks)
    target.num_parameters = num_parameters
    target.check_readout()
    return target


def partition(config: ModelConfig, model: Any, ranks: Ranks) -> Any:
    """Fill a skeleton with weights, its layers' in parts over the ranks; return what gathers them.

    Rank 0 reads one tensor after the other and hands it to all, who keep their part of it: no rank
    ever holds more than its part, the readout, and one tensor. What the readout is made of, and
    whatever lies outside the layers' decoder, is whole on every rank, and a buffer: DeepSpeed
    partitions parameters.
    """
    deepspeed = import_deepspeed(ranks)
    zero: dict[str, Any] = {
        "stage": 3,
        # Otherwise every linear layer of this process, the drafter's too, would be DeepSpeed's.
        "memory_efficient_linear": False,
        # Vectors (norms, biases) stay once they were gathered: they are small, and many.
        "stage3_param_persistence_threshold": model.config.get_text_config(
            decoder=True
        ).hidden_size,
    }
    if ranks.device.type == "cpu":  # nothing overlaps there: what is fetched early only takes room
        zero["stage3_prefetch_bucket_size"] = 0
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": model.dtype == torch.bfloat16},
        "zero_optimization": zero,
    }
    whole = names_of_whole(model)
    likes = model.state_dict()
    first: Any = None  # a parameter; its methods partition the others
    for place in places(config, model):
        like = likes[place.names[0]]
        kept = dtype_of(model, place, like)
        if ranks.is_main:
            weight = read(place, kept).to(ranks.device)
        else:  # to be overwritten by rank 0's
            weight = torch.empty(like.shape, dtype=kept, device=ranks.device)
        if whole.intersection(place.names) or not weight.is_floating_point():
            ranks.broadcast_in_place([weight])
            put(model, place, weight)
            continue
        parameter = nn.Parameter(weight, requires_grad=False)
        del weight
        with quiet():  # both broadcast rank 0's and keep this rank's part
            if first is None:
                holder = nn.Module()
                holder.register_parameter("first", parameter)
                deepspeed.zero.Init(module=holder, config_dict_or_path=settings)
                first = parameter
            else:
                first.convert_to_zero_parameters(param_list=[parameter])
        put(model, place, parameter)
    for module in model.modules():  # buffers that are computed, not read
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(ranks.device)
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=model.get_decoder(), config=settings, dist_init_required=False
        )
    return engine


def refuse_unless_shardable(config: ModelConfig, model_config: Any, ranks: Ranks) -> None:
    """Raise ValueError, before any weight is read, for what ZeRO-3 does not partition."""
    instead = "use hardware.target_placement=device"
    if ranks.world_size == 1:
        raise ValueError(
            "hardware.target_placement=zero3 partitions the target over several ranks, got 1; use"
            " hardware.target_placement=device_map, or hardware.ranks=N"
        )
    quantized = getattr(model_config, "quantization_config", None) is not None
    if config.quantization is not None or quantized:
        got = config.quantization or "weights that come quantised"
        raise ValueError(
            f"hardware.target_placement=zero3 partitions plain weights, got {got} (model="
            f"{config.name}); {instead} or device_map, or set model.quantization=null"
        )
    if config.inflate is not None:
        raise ValueError(
            "hardware.target_placement=zero3 partitions weights as they are read, got"
            f" model.inflate={config.inflate}; {instead}, or set model.inflate=null"
        )
    if isinstance(config, RandomModelConfig):
        raise ValueError(
            "hardware.target_placement=zero3 reads weights tensor by tensor, and those of model="
            f"{config.name} are drawn, whole; {instead}, or save them and give model.path=DIR"
        )


def names_of_whole(model: Any) -> set[str]:
    """Return the names of parameters that stay whole: the readout's, and those past the decoder."""
    decoder, table = model.get_decoder(), model.get_input_embeddings()
    norm = final_norm_of(decoder)
    kept = {id(p) for p in (*table.parameters(), *norm.parameters())}
    parts = {id(p) for p in decoder.parameters()} - kept
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) not in parts}


def dtype_of(model: Any, place: Place, like: Tensor) -> torch.dtype:
    """Return the dtype of a weight: the model's, but for the few that an architecture exempts."""
    exempt = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if like.is_floating_point() and any(part in place.names[0].split(".") for part in exempt):
        return torch.float32
    return like.dtype


class ShardedTarget(Target):
    """A target whose layers are gathered as they run: every pass is one of all ranks together."""

    def __init__(
        self, model: Any, tokenizer: Any, spec: TargetSpec, engine: Any, ranks: Ranks
    ) -> None:
        super().__init__(model, tokenizer, spec)
        self.ranks = ranks
        self.scattered = True
        self._engine = engine  # its hooks gather
        self._counting = False
        parts = [p for p in self.decoder.parameters() if hasattr(p, "ds_numel")]
        held = sum(p.ds_tensor.nbytes for p in parts)
        self.where = (
            f"zero3: each of {ranks.world_size} ranks holds {gigabytes(held)} of the layers'"
            f" {gigabytes(sum(p.ds_numel * p.element_size() for p in parts))}, and the readout's"
            f" {gigabytes(self.readout.nbytes)} whole"
        )

    def features(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        """Read hidden states, on every rank those of its own batch."""
        if self._counting:
            self._any_busy(True)
        with quiet():
            return super().features(batch, captures)

    def step(
        self,
        cache: RaggedCache,
        tokens: Int[Tensor, "batch new"],
        captures: tuple[int, ...] = (),
        counts: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> tuple[Float[Tensor, "batch scored vocab"], TargetFeatures]:
        """Append tokens to the cache, on every rank to its own; see `Target.step`."""
        if self._counting:
            self._any_busy(True)
        with quiet():
            return super().step(cache, tokens, captures, counts, last_only)

    def check_readout(self) -> None:
        """Raise ValueError unless the readout embeds and reads out exactly as the model does."""
        with quiet():
            super().check_readout()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let ranks take different numbers of steps: who is done first passes along until all are.

        A step then tells the other ranks that it is one; a rank that is done answers each with a
        pass over a token of no meaning, and leaves when no rank has a step left.
        """
        assert not self._counting, "in_step does not nest"
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        while self._any_busy(False):
            idle = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.step(self.begin(), idle)

    def _any_busy(self, busy: bool) -> bool:
        return bool(self.ranks.sum_over_ranks(torch.tensor(float(busy), device=self.device)) > 0)
