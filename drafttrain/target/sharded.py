"""A target partitioned over the ranks: ZeRO-3 (Rajbhandari et al., 2020, arXiv:1910.02054).

Each rank keeps its part of every layer; a layer is gathered when it runs, on all ranks at once, and
released afterwards. So every rank must run the target equally often: see `ShardedTarget.in_step`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich import filesize
from torch import Tensor, nn

from drafttrain.core.types import Batch, TargetFeatures, TargetSpec
from drafttrain.runtime.deepspeed import import_deepspeed, quiet
from drafttrain.runtime.ranks import Ranks
from drafttrain.target.describe import open_target, with_fingerprint
from drafttrain.target.model import Target
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.inflate import count_parameters
from drafttrain.target.pretrained.limits import final_norm_of
from drafttrain.target.pretrained.models import load_model_config
from drafttrain.target.pretrained.shards import places, put, read, skeleton


def load_sharded(config: ModelConfig, dtype: torch.dtype, ranks: Ranks) -> "ShardedTarget":
    """Load a partitioned target, frozen; all ranks call this together.

    ValueError for what cannot be partitioned, and for weights that do not fit the configuration.
    """
    refuse_unless_shardable(config, load_model_config(config), ranks)
    model_config, tokenizer, spec = open_target(config)
    model = skeleton(config, model_config, dtype)
    num_parameters = count_parameters(model)
    engine = partition(config, model, ranks)
    spec = with_fingerprint(spec, config, dtype, str(ranks.device))
    target = ShardedTarget(model, tokenizer, spec, engine, ranks)
    target.num_parameters = num_parameters
    target.check_readout()
    return target


def partition(config: ModelConfig, model: Any, ranks: Ranks) -> Any:
    """Load weights into a skeleton, layers partitioned over ranks; return the gathering engine.

    Rank 0 reads one tensor after another and sends it to all: no rank ever holds more than its
    part, the readout, and one tensor. The readout, and whatever is outside the decoder, is whole
    on every rank, as buffers: DeepSpeed partitions parameters only.
    """
    deepspeed = import_deepspeed(ranks)
    text = model.config.get_text_config(decoder=True)
    zero: dict[str, Any] = {
        "stage": 3,
        # Otherwise DeepSpeed would replace every linear layer of this process, the drafter's too.
        "memory_efficient_linear": False,
        # Vectors (norms, biases) stay once gathered: they are small, and many.
        "stage3_param_persistence_threshold": text.hidden_size,
    }
    if ranks.device.type == "cpu":  # nothing overlaps there: prefetching only takes memory
        zero["stage3_prefetch_bucket_size"] = 0
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": model.dtype == torch.bfloat16},
        "zero_optimization": zero,
    }
    decoder, table = model.get_decoder(), model.get_input_embeddings()
    kept = {id(p) for p in (*table.parameters(), *final_norm_of(decoder).parameters())}
    whole = {id(p) for p in model.parameters()} - {id(p) for p in decoder.parameters()} | kept
    exempt = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    likes = model.state_dict(keep_vars=True)
    first: Any = None  # a parameter; its methods partition the others
    for place in places(config, model):
        like = likes[place.names[0]]
        dtype = like.dtype  # the model's, except for the few that an architecture exempts
        if dtype.is_floating_point and any(p in place.names[0].split(".") for p in exempt):
            dtype = torch.float32
        if ranks.is_main:
            weight = read(place, dtype).to(ranks.device)
        else:  # to be overwritten by rank 0's
            weight = torch.empty(like.shape, dtype=dtype, device=ranks.device)
        if id(like) in whole or not weight.is_floating_point():
            ranks.broadcast_in_place([weight])
            put(model, place, weight)
            continue
        parameter = nn.Parameter(weight, requires_grad=False)
        del weight
        with quiet():  # both branches broadcast rank 0's weight and keep this rank's part
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
        engine, *_ = deepspeed.initialize(model=decoder, config=settings, dist_init_required=False)
    return engine


def refuse_unless_shardable(config: ModelConfig, model_config: Any, ranks: Ranks) -> None:
    """Raise ValueError, before any weight is read, for a target that ZeRO-3 cannot partition."""
    instead = "use hardware.target_placement=device"
    quantized = getattr(model_config, "quantization_config", None) is not None
    if ranks.world_size == 1:
        problem = (
            "partitions the target over several ranks, got 1; use"
            " hardware.target_placement=device_map, or hardware.ranks=N"
        )
    elif config.quantization is not None or quantized:
        got = config.quantization or "weights that come quantised"
        problem = (
            f"partitions plain weights, got {got} (model={config.name}); {instead} or device_map,"
            " or set model.quantization=null"
        )
    elif isinstance(config, RandomModelConfig):
        problem = (
            f"reads weights tensor by tensor, and model={config.name} draws its weights at random;"
            f" {instead}, or save them and give model.path=DIR"
        )
    else:
        return
    raise ValueError(f"hardware.target_placement=zero3 {problem}")


class ShardedTarget(Target):
    """A target whose layers are gathered as they run: all ranks take part in every pass."""

    def __init__(
        self, model: Any, tokenizer: Any, spec: TargetSpec, engine: Any, ranks: Ranks
    ) -> None:
        super().__init__(model, tokenizer, spec)
        self.ranks = ranks
        self._engine = engine  # its hooks gather
        self._counting = False
        parts = [p for p in self.decoder.parameters() if hasattr(p, "ds_numel")]
        held = filesize.decimal(sum(p.ds_tensor.nbytes for p in parts))
        layers = filesize.decimal(sum(p.ds_numel * p.element_size() for p in parts))
        self.where = (
            f"zero3: each of {ranks.world_size} ranks holds {held} of the layers' {layers}, and the"
            f" readout's {filesize.decimal(self.readout.nbytes)} whole"
        )

    def features(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        with self._together():
            return super().features(batch, captures)

    def step(self, *args: Any, **named: Any) -> tuple[Tensor, TargetFeatures]:
        with self._together():
            return super().step(*args, **named)

    def check_readout(self) -> None:
        with quiet():
            super().check_readout()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let ranks take different numbers of steps: a rank that is done waits for the others.

        Each step announces itself to the other ranks; a rank that is done answers each one with a
        pass over a dummy token, and leaves when no rank has a step left.
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

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._counting:
            self._any_busy(True)
        with quiet():
            yield

    def _any_busy(self, busy: bool) -> bool:
        return bool(self.ranks.sum_over_ranks(torch.tensor(float(busy), device=self.device)) > 0)
