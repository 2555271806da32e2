"""A second device without a GPU: its tensors lie on the CPU, and may not be mixed with the CPU's.

torch lets a device be written in Python (PrivateUse1). This one refuses what CUDA refuses, and
notes where the host waits for the device, by the line of drafttrain that asked. It has no kernels
of its own, no streams and no speed. `install` it once in a process; its name is `NAME`.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from paths import ROOT
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
PACKAGE = str(ROOT / "drafttrain") + "/"
aten = torch.ops.aten


class Wait(NamedTuple):
    """A wait of the host; file, function and line of drafttrain, empty where it did not ask."""

    file: str
    function: str
    line: int
    what: str


waits: Counter[Wait] = Counter()
_pinned: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_libraries: list[torch.library.Library] = []

# The result's size, or the answer, is only known on the device.
ASKING = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.nonzero.default, aten.masked_select.default, aten.bincount.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor}
WRITING = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Beside pointwise operations these take a CPU tensor without dimensions for a number.
TAKING_NUMBERS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, *WRITING}
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


class SecondTensor(torch.Tensor):
    """A tensor on the device; `raw` holds its values."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "SecondTensor":
        assert type(raw) is not SecondTensor, "a tensor of the device inside another"
        with torch.inference_mode(False):  # a view of a plain tensor is a plain one there too
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.shape,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                layout=raw.layout,
                device=torch.device(NAME, 0),
            )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SecondTensor({self.raw!r})"

    def __setitem__(self, index: Any, value: Any) -> None:
        """On CUDA alone torch makes a number a tensor of the CPU; into one place it copies it.

        More places it fills (`copy_to` of TensorIndexing.h).
        """
        places = index if isinstance(index, tuple) else (index,)
        single = len(places) == self.dim() and all(isinstance(place, int) for place in places)
        if single and not isinstance(value, torch.Tensor):
            wait("copy of a number from the host")
        super().__setitem__(index, value)

    def tolist(self) -> Any:
        wait("tolist")
        return self.raw.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        twin: torch.Tensor = SecondTensor(self.raw.clone())
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        memo[id(self)] = twin
        return twin

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy; use Tensor.cpu()")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Capturing:
    """Operations on the device, recorded instead of run, as a CUDA graph is captured.

    They do run, to know their results' shapes, but what they wrote over is put back.
    """

    now: "Capturing | None" = None
    num_captured = num_replayed = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address
        self.made: set[int] = set()

    @classmethod
    def capture(
        cls, function: Callable[[], Any], device: torch.device
    ) -> tuple[Any, Callable[[], None]]:
        """Capture a function for `drafttrain.core.ops.graphs`."""
        assert (cls.now, device.type) == (None, NAME), "a capture inside another, or elsewhere"
        cls.now, found = cls(), None
        try:
            found, outputs = cls.now, function()
        finally:
            for place, value in cls.now.before.values():
                place.copy_(value)
            cls.now = None
        cls.num_captured += 1
        return outputs, found.replay

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on values and record it."""
        given: list[torch.Tensor] = []
        each((args, kwargs), lambda tensor: given.append(tensor) or tensor)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in given}
        if changing := func._schema.is_mutable:
            for tensor in given:
                address = tensor.untyped_storage().data_ptr()
                if address not in self.made | self.before.keys():
                    length = tensor.untyped_storage().nbytes() // tensor.element_size()
                    whole = torch.as_strided(tensor, (length,), (1,), 0)
                    self.before[address] = whole, whole.clone()
        kernel = KERNELS.get(func, func)
        result = kernel(*args, **kwargs)
        fresh: list[torch.Tensor] = []
        each(
            result,
            lambda t: fresh.append(t) if t.untyped_storage().data_ptr() not in addresses else t,
        )
        self.made |= {tensor.untyped_storage().data_ptr() for tensor in fresh}
        if fresh or changing:  # a view follows what it views
            self.calls.append((kernel, args, kwargs, fresh))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Capturing":
        raise TypeError("cannot pickle a graph")  # as CUDA's

    def replay(self) -> None:
        """Run the operations again on the same memory."""
        type(self).num_replayed += 1
        for kernel, args, kwargs, fresh in self.calls:
            again: list[torch.Tensor] = []
            each(kernel(*args, **kwargs), lambda tensor, into=again: into.append(tensor))
            if fresh:
                for place, value in zip(fresh, again, strict=True):
                    place.copy_(value)


def wait(what: str) -> None:
    """Note that the host waits, for the innermost line of drafttrain on the stack."""
    if Capturing.now is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        waits[Wait("", "", 0, what)] += 1
        return
    code = frame.f_code
    file = code.co_filename.removeprefix(PACKAGE)
    waits[Wait(file, code.co_name, frame.f_lineno, what)] += 1


@contextmanager
def counted() -> Iterator[Counter[Wait]]:
    """Give the waits of the block, once it has ended."""
    waits.clear()
    found: Counter[Wait] = Counter()
    yield found
    found.update(waits)


def is_ours(value: Any) -> bool:
    return type(value) is SecondTensor  # of a parameter too


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, as the device would: refuse, note, compute, wrap."""
    if func._can_decompose():  # torch has done so already, but not in inference mode
        return func.decompose(*args, **kwargs)
    tensors: list[Any] = []
    raw_args, raw_kwargs = each(
        (args, kwargs), lambda tensor: tensors.append(tensor) or raw(tensor)
    )
    ours = [tensor for tensor in tensors if is_ours(tensor)]
    theirs = [tensor for tensor in tensors if not is_ours(tensor)]
    asked = kwargs.get("device")
    here = bool(ours) if asked is None else torch.device(asked).type == NAME
    if func is aten.copy_.default:
        here = is_ours(args[0])
        note_copy(args[1], here, len(args) > 2 and args[2])
    elif func is aten._to_copy.default:
        note_copy(args[0], here, kwargs.get("non_blocking", False))
    else:
        check(func, args, ours, theirs)
    raw_kwargs.pop("pin_memory", None)
    if asked is not None:
        raw_kwargs["device"] = torch.device("cpu")
    shapes = [tensor.raw.shape for tensor in ours]
    if Capturing.now is not None and here:
        result = Capturing.now.call(func, raw_args, raw_kwargs)
    else:
        result = KERNELS.get(func, func)(*raw_args, **raw_kwargs)
    assert shapes == [tensor.raw.shape for tensor in ours], f"{func} gave a tensor another shape"
    if not here:
        return result
    same = {id(tensor.raw): tensor for tensor in ours}  # an operation in place returns its input
    return each(result, lambda found: same[id(found)] if id(found) in same else SecondTensor(found))


def each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the arguments or results of an operation with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([each(part, change) for part in value])
    if isinstance(value, dict):
        return {key: each(part, change) for key, part in value.items()}
    return value


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if is_ours(tensor) else tensor


def note_copy(source: torch.Tensor, here: bool, non_blocking: bool) -> None:
    if is_ours(source) != here and Capturing.now is not None:
        wait("a copy between host and device")  # the graph would copy from this memory for ever
    if is_ours(source) and not here:
        wait("copy to the host")
    elif not is_ours(source) and here and not (non_blocking and is_pinned(source)):
        wait("copy from the host")


def check(func: Any, args: Any, ours: list[Any], theirs: list[torch.Tensor]) -> None:
    """Refuse tensors of two devices, and note the wait of an operation that has one."""
    if func in ASKING and ours:
        wait(func.overloadpacket.__name__)
    if func in INDEXING | WRITING and is_ours(args[0]):
        index = [part for part in args[1] if part is not None]
        if any(not is_ours(part) for part in index):
            wait("copy of an index from the host")
        theirs = [tensor for tensor in theirs if not any(tensor is part for part in index)]
        filled = func in WRITING and len(index) == 1 and args[2].numel() == 1
        if any(part.dtype in (torch.bool, torch.uint8) for part in index) and not filled:
            wait("nonzero of a mask")
    numbers = torch.Tag.pointwise in func.tags or func in TAKING_NUMBERS
    if ours and any(tensor.dim() > 0 or not numbers for tensor in theirs):
        found = ", ".join(f"{list(t.shape)} of {t.device}" for t in (*ours, *theirs))
        raise RuntimeError(f"Expected all tensors to be on the same device in {func}: {found}")


def efficient(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    with_logsumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute CUDA's memory-efficient attention by its definition."""
    assert dropout == 0.0, "not written"
    assert queries.shape[1] == keys.shape[1], "it does not group heads"
    if bias is not None:
        assert bias.stride(-2) % (16 // bias.element_size()) == 0, "rows must be aligned"
    scores = scores_of(queries, keys, bias, causal, scale)
    total = scores.logsumexp(-1)
    room = -total.shape[-1] % 32  # it writes as many as its blocks have
    padded = torch.nn.functional.pad(total, (0, room), value=torch.nan).float()
    nothing = torch.zeros((), dtype=torch.long)
    mixed = ((scores - total[..., None]).exp() @ values.float()).to(queries.dtype)
    return as_written(mixed), padded, nothing, nothing.clone()


def as_written(mixed: torch.Tensor) -> torch.Tensor:
    """Return an output in the layout of CUDA's kernel: the heads of a position side by side."""
    return mixed.transpose(1, 2).contiguous().transpose(1, 2)


def efficient_backward(
    grad: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    mixed: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Compute its backward from the output and the log-sum-exp that are given."""
    assert logsumexp.shape[-1] % 32 == 0, "padded, as the forward gave it"
    if queries.dtype != torch.float32:  # there it reads the output without asking for its strides
        assert mixed.stride() == as_written(mixed).stride(), "laid out as the forward gave it"
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    total = logsumexp[..., : queries.shape[2], None]
    weights = (scores_of(queries, keys, bias, causal, scale) - total).exp()
    wide = grad.float()
    along = (wide * mixed.float()).sum(-1, keepdim=True)
    slopes = weights * (wide @ values.float().transpose(-1, -2) - along)
    found = (
        (slopes @ keys.float() * factor).to(queries.dtype),
        (slopes.transpose(-1, -2) @ queries.float() * factor).to(keys.dtype),
        (weights.transpose(-1, -2) @ wide).to(values.dtype),
    )
    return *found, slopes.to(grad.dtype) if wanted[3] and bias is not None else None


def scores_of(
    queries: torch.Tensor,
    keys: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = queries.float() @ keys.float().transpose(-1, -2) * factor
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    return_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute CUDA's flash attention by its definition, for what it takes."""
    assert queries.dtype in (torch.bfloat16, torch.float16), "half precision alone"
    assert queries.shape[-1] % 8 == 0, "heads whose width is a multiple of 8"
    assert queries.shape[-1] <= 256, "heads of at most 256"
    group = queries.shape[1] // keys.shape[1]
    keys, values = (heads.repeat_interleave(group, 1) for heads in (keys, values))
    mixed, total, seed, offset = efficient(queries, keys, values, None, True, dropout, causal)
    total = total[..., : queries.shape[2]]
    length = queries.shape[2]
    return mixed, total, None, None, length, length, seed, offset, seed.clone()


KERNELS = {FLASH: flash, EFFICIENT: efficient, EFFICIENT_BACKWARD: efficient_backward}


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a CPU tensor as page-locked."""
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def install() -> None:
    """Make torch know the device, in this process."""
    if _libraries:
        return
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda device=None: wait("synchronize"),
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: torch.zeros(8, dtype=torch.uint8),
        set_rng_state=lambda *state: None,
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if (op := factory_named(name)) is not None:
            library.impl(name.removeprefix("aten::"), lambda *a, _op=op, **k: run(_op, a, k), KEY)
    copy = lambda source, into, non_blocking=False: run(  # noqa: E731
        aten.copy_.default, (into, source, non_blocking), {}
    )
    library.impl("_copy_from", copy, KEY)
    # torch asks a device for page-locked memory, in C++ only.
    library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: pin(tensor.clone()), "CPU")
    zeros = torch.zeros

    def pinned_zeros(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return pin(zeros(*shape, **more)) if pin_memory else zeros(*shape, **more)

    torch.zeros = pinned_zeros
    # A module that moves keeps its parameters, and what is tied stays tied, as on CUDA.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _libraries.append(library)


KEY = "PrivateUse1"
ELSEWHERE = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "_make_dep_token", "from_file")


def factory_named(name: str) -> Any:
    """Return an operation that makes a tensor from no tensor; None if `name` is another kind."""
    if not name.startswith("aten::") or any(word in name for word in ELSEWHERE):
        return None
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(aten, packet, None), overload or "default", None)
    if op is None:
        return None
    taken = {argument.name: str(argument.type) for argument in op._schema.arguments}
    given = [str(result.type) for result in op._schema.returns]
    makes = given == ["Tensor"] and "device" in taken
    return op if makes and not any("Tensor" in kind for kind in taken.values()) else None
