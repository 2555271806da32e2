"""The rank of this process among those that train together, and their messages to each other."""

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drafttrain.runtime.lock import HeldError, attend, hold
from drafttrain.runtime.rank_process import STORE, is_ours, say_error
from drafttrain.runtime.untrusted_input import shown

# A collective of the training step: every rank is busy with the same work, so none is this late.
STEP_TIMEOUT = timedelta(minutes=10)
# Barriers and messages wait while rank 0 works alone (validation, saving, writing conversations).
# They use gloo, which notices at once when the other side has died.
MESSAGE_TIMEOUT = timedelta(hours=24)
LATE_S, POLL_S = 15.0, 0.05  # until a rank names those that are late; between two looks at them
BUCKET = 25 << 20  # bytes that are summed together, as in torch's DistributedDataParallel


BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class LostRankError(RuntimeError):
    """Another rank died or stopped answering."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks, numbered as by torchrun; alone it is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    _messages: Any = field(default=None, repr=False)  # gloo group; None when alone
    goes_on: str = "start the run again with run.resume=true"  # what to do when a rank is lost

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            with self._naming_the_loss():
                dist.barrier(group=self._messages)

    def part(self) -> None:
        """Wait for every rank before this one ends; a rank that is lost has been here already.

        The first to end after a collective closes its connections, which the last may still read.
        """
        with suppress(LostRankError):
            self.barrier()

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of every rank's `value`, on the device of `value`; shapes must agree."""
        if self.world_size == 1:
            return value.clone()
        copy = value.detach().to(self.device, copy=True)
        self.sum_in_place([copy])
        return copy.to(value.device)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value`, plain JSON, on every rank.

        torch's own function pickles it, which lets anyone on the ranks' network run code.
        """
        if self.world_size == 1:
            return value
        with self._naming_the_loss():
            return self._object_of(0, value)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, plain JSON, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        with self._naming_the_loss():
            return [self._object_of(rank, value) for rank in range(self.world_size)]

    def _object_of(self, rank: int, value: Any) -> Any:
        content = bytearray(json.dumps(value if rank == self.rank else None).encode())
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=rank, group=self._messages)
        if rank != self.rank:
            content = bytearray(int(size))
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), rank, group=self._messages)
        return json.loads(content)

    def require_equal(self, values: dict[str, Any]) -> None:
        """Raise ValueError on every rank, naming the first of `values` that ranks differ in.

        values: plain JSON by the name that a message calls it by.
        """
        if self.world_size == 1:
            return
        main, *others = self.gather_objects(values)
        for rank, theirs in enumerate(others, start=1):
            for name in main | theirs:
                on_main, on_rank = main.get(name), theirs.get(name)
                if json.dumps(on_main, sort_keys=True) != json.dumps(on_rank, sort_keys=True):
                    # Not as Python compares, for which 1, 1.0 and True are equal, and NaN is not.
                    raise ValueError(
                        f"{shown(name)} must be the same on every rank, got {shown(on_main)} on "
                        f"rank 0 and {shown(on_rank)} on rank {rank}; start every rank with the "
                        "same command, the same versions of the packages and the same files"
                    )

    def broadcast_tensors(self, tensors: list[Tensor] | None) -> list[Tensor]:
        """Return rank 0's tensors, which lie on the CPU, on every rank; the others give None."""
        own = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors or ()]
        kinds = self.broadcast_object(own)
        found = tensors or [torch.empty(size, dtype=getattr(torch, kind)) for size, kind in kinds]
        if self.world_size > 1:
            with self._naming_the_loss():
                for tensor in found:
                    dist.broadcast(tensor, src=0, group=self._messages)
        return found

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return what `work` gives on rank 0, None elsewhere; what it raises there ends all ranks.

        An error of rank 0 is a ValueError of the same words on the others.
        """
        found, failed = None, None
        if self.is_main:
            try:
                found = work()
            except Exception as error:
                failed = error
        told = self.broadcast_object(None if failed is None else str(failed))
        if failed is not None:
            raise failed
        if told is not None:
            raise ValueError(told)
        return found

    def broadcast_in_place(self, tensors: list[Tensor], source: int = 0) -> None:
        """Overwrite `tensors`, which lie on `device`, with those of one rank."""
        self._in_buckets(tensors, partial(dist.broadcast, src=source))

    def sum_in_place(self, tensors: list[Tensor]) -> None:
        """Overwrite `tensors`, which lie on `device`, with their sums over ranks."""
        self._in_buckets(tensors, dist.all_reduce)

    def _in_buckets(self, tensors: list[Tensor], collective: Callable[..., Any]) -> None:
        """Run a collective in place; small tensors share one, for each has a cost of its own."""
        if self.world_size == 1:
            return
        with self._naming_the_loss():
            buckets = [(bucket, _flat(bucket)) for bucket in _buckets(tensors)]
            work = [collective(flat, async_op=True) for _, flat in buckets]
            for handle, (bucket, flat) in zip(work, buckets, strict=True):
                assert handle is not None
                handle.wait()
                if len(bucket) > 1:
                    parts = flat.split([tensor.numel() for tensor in bucket])
                    for tensor, part in zip(bucket, parts, strict=True):
                        tensor.copy_(part.view_as(tensor))

    def sum_soon(self, value: int) -> Callable[[], int]:
        """Return a function that waits for the sum of every rank's `value`; do not wait here."""
        if self.world_size == 1:
            return lambda: value
        box = torch.tensor(value)
        with self._naming_the_loss():
            work = dist.all_reduce(box, group=self._messages, async_op=True)
        assert work is not None

        def total() -> int:
            with self._naming_the_loss():
                work.wait()
            return int(box)

        return total

    @contextmanager
    def holding(
        self, place: Path, key: str, command: str, say: Callable[[str], None]
    ) -> Iterator[None]:
        """Lock a folder for these ranks, or raise on all of them where that is impossible."""
        with ExitStack() as stack:
            problem: str | None = None
            if self.is_main:
                try:
                    stack.enter_context(hold(place, key, command, say))
                except ValueError as error:  # DiskError too
                    problem = str(error)
            problem = self.broadcast_object(problem)
            if problem is not None:
                raise HeldError(problem)
            if not self.is_main:
                stack.enter_context(attend(place, self.rank))
            yield

    @contextmanager
    def _naming_the_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._loss(error) from error

    @contextmanager
    def naming_a_loss(self) -> Iterator[None]:
        """Raise LostRankError where a library's collective, such as DeepSpeed's, loses a rank."""
        try:
            yield
        except LostRankError:
            raise
        except RuntimeError as error:
            known = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
            if self.world_size == 1 or not known:
                raise
            raise self._loss(error) from error

    def _loss(self, error: RuntimeError) -> LostRankError:
        return LostRankError(
            f"rank {self.rank} lost another of the {self.world_size} ranks. The first error "
            f"among the outputs of the other ranks is the cause; {self.goes_on}. "
            f"({str(error).splitlines()[0]})"
        )


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one dtype; what fills a bucket alone is in none with others.

    Every rank must have them in the same order.
    """
    buckets: list[list[Tensor]] = []
    open_ones: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = open_ones.get(tensor.dtype, [])
        if not bucket or sum(part.nbytes for part in bucket) + tensor.nbytes > BUCKET:
            bucket = open_ones[tensor.dtype] = []
            buckets.append(bucket)
        bucket.append(tensor)
    return buckets


def _flat(bucket: list[Tensor]) -> Tensor:
    return bucket[0] if len(bucket) == 1 else torch.cat([tensor.flatten() for tensor in bucket])


ALONE = Ranks(0, 0, 1, torch.device("cpu"))  # where its device does not matter

_joined: Ranks | None = None


def join_ranks(device: str, with_group: bool = False) -> Ranks:
    """Join the ranks that a launcher started, once; later calls return the same `Ranks`.

    device: "cpu", "cuda" (each rank takes the GPU of its local rank), or one GPU of a run of a
    single process. with_group: make a process group even for a rank that is alone.
    """
    global _joined
    if _joined is None or _joined.world_size == 1:
        _joined = _join(device)
    wanted = torch.device(device).type
    assert _joined.device.type == wanted, f"joined on {_joined.device}, now asked for {device}"
    if with_group and not dist.is_initialized():
        backend = BACKENDS[_joined.device.type]
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    return _joined


def _join(device: str) -> Ranks:
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    place = torch.device(device)
    if place.type == "cuda":
        index = local_rank if place.index is None else place.index
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"hardware.device={place} needs GPU {index}, but this machine shows "
                f"{torch.cuda.device_count()}; start at most one process per GPU "
                "(torchrun --nproc_per_node) or set CUDA_VISIBLE_DEVICES"
            )
        place = torch.device("cuda", index)
        torch.cuda.set_device(place)
    if world_size == 1:
        return Ranks(rank, local_rank, world_size, place)
    store, backend = _store_of_all(rank, world_size, local_rank == 0), BACKENDS[place.type]
    try:
        dist.init_process_group(
            backend, timeout=STEP_TIMEOUT, store=store, rank=rank, world_size=world_size
        )
        atexit.register(_leave)
        messages = dist.new_group(backend="gloo", timeout=MESSAGE_TIMEOUT)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise LostRankError(f"rank {rank} of {world_size} cannot join: {problem}") from error
    return Ranks(rank, local_rank, world_size, place, messages)


def _store_of_all(rank: int, world_size: int, aloud: bool) -> dist.Store:
    """Return the store by which the ranks meet, once each has left its number there.

    Where some are late, `aloud` says so on standard error. LostRankError where they never come.
    """
    place = " and ".join(f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT"))
    begun, store, missing = time.monotonic(), None, list(range(world_size))
    while True:
        try:
            store = store or _store(rank, world_size)
            store.set(str(rank), "here")
            missing = [other for other in missing if not store.check([str(other)])]
        except RuntimeError as error:
            if rank == 0:
                cause = str(error).splitlines()[0]
                raise LostRankError(f"rank 0 cannot open {place}: {cause}") from error
            store = None  # rank 0, which opens it, is not there
        if store and not missing:
            store.set_timeout(STEP_TIMEOUT)
            return store
        absent, waited = ", ".join(map(str, missing)) if store else "0", time.monotonic() - begun
        here = (
            f"rank {rank} of {world_size} waits for rank {shown(absent)}; each must be started, "
            f"with the same WORLD_SIZE, {place}"
        )
        if waited > STEP_TIMEOUT.total_seconds():
            raise LostRankError(here)
        if waited > LATE_S and aloud:
            say_error(here)
            aloud = False
        time.sleep(POLL_S)


def _store(rank: int, world_size: int) -> dist.Store:
    if is_ours():
        return dist.FileStore(os.environ[STORE], world_size)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has
    late = timedelta(seconds=LATE_S)
    store = dist.TCPStore(address, port, None, opens, late, False, multi_tenant=True)
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _leave() -> None:
    global _joined
    _joined = None
    if dist.is_initialized():
        dist.destroy_process_group()
