"""Ranks agree on sums and messages, and one that is lost is noticed at once.

Run as a script, this file is one rank that does what its argument says.
"""

import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import PYTHONPATH

from drafttrain.commands.setup.target_and_drafter import shared_samples
from drafttrain.core.types import Sample
from drafttrain.runtime import ranks as runtime_ranks
from drafttrain.runtime.ranks import BUCKET, LostRankError, Ranks, join_ranks


def run_ranks(task: str, count: int = 2, script: str = __file__) -> list[str]:
    """Start ranks without torchrun, which would kill the others when one dies; return outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(count):
        environment = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        command = [sys.executable, script, task]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return [process.communicate(timeout=300)[0].strip() for process in ranks]


def test_a_process_alone_is_its_own_world() -> None:
    alone = join_ranks("cpu")
    assert (alone.rank, alone.world_size, alone.is_main) == (0, 1, True)
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(alone.sum_over_ranks(value), value)
    assert alone.sum_over_ranks(value) is not value
    assert alone.broadcast_object({"a": 1}) == {"a": 1}
    alone.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"hardware\.device=cuda needs GPU 0.* shows 0; start"):
        join_ranks("cuda")


@pytest.mark.slow
def test_three_ranks_agree() -> None:
    for rank, output in enumerate(run_ranks("agree", count=3)):
        assert output == f"{rank} sum 6.0 object {{'from': 0}} of [[], [1], [2, 2]]"


@pytest.mark.slow
def test_what_rank_0_reads_all_ranks_have() -> None:
    problem = "invalid literal for int() with base 10: 'x'"
    assert run_ranks("share") == [f"read {problem}", f"None {problem}"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["barrier", "sum"])
def test_a_rank_that_dies_is_noticed_by_the_other_at_once(task: str) -> None:
    survivor, dead = run_ranks(task)
    assert dead == "gone"
    message, seconds = survivor.rsplit(" ", 1)
    assert message.startswith("rank 0 lost another of the 2 ranks")
    assert "run.resume=true" in message
    assert float(seconds) < 20


@pytest.mark.slow
def test_what_is_written_to_the_ranks_network_is_not_unpickled() -> None:
    """Rank 0 plays a neighbour who has got onto it."""
    assert run_ranks("poison") == ["", "refused"]


class Poison:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def poison(ranks: Ranks) -> None:
    if ranks.is_main:
        dist.broadcast_object_list([Poison()], src=0, group=ranks._messages)
        ranks.barrier()
        return
    try:
        ranks.broadcast_object(None)
    except ValueError:
        print("refused")
    ranks.barrier()


def agree(ranks: Ranks) -> None:
    total = ranks.sum_over_ranks(torch.tensor(ranks.rank + 1.0))
    message = ranks.broadcast_object({"from": ranks.rank})
    ranks.barrier()
    each = ranks.gather_objects([ranks.rank] * ranks.rank)
    print(ranks.rank, "sum", total.item(), "object", message, "of", each)


def share(ranks: Ranks) -> None:
    """Sums in buckets are those of each tensor alone; samples are rank 0's; so are errors."""
    generator = torch.Generator().manual_seed(ranks.rank)
    sizes = [(3,), (40, 5), (2, 2, 2), (50,), ()]
    own = [torch.randn(size, generator=generator) for size in sizes] + [torch.arange(3)]
    whole = [ranks.sum_over_ranks(tensor) for tensor in own]
    kept = [tensor.clone() for tensor in own]
    for size in (BUCKET, 300, 1):
        runtime_ranks.BUCKET = size
        summed = [tensor.clone() for tensor in kept]
        ranks.sum_in_place(summed)
        assert all(torch.equal(a, b) for a, b in zip(summed, whole, strict=True)), size
    tokens = [torch.arange(4), torch.arange(2) + 7]
    samples = [Sample(part, part > 1, 5 + place) for place, part in enumerate(tokens)]
    for mine, expected in zip(
        shared_samples(samples if ranks.is_main else [], ranks), samples, strict=True
    ):
        assert torch.equal(mine.tokens, expected.tokens), "tokens"
        assert torch.equal(mine.loss_mask, expected.loss_mask), "mask"
        assert mine.index == expected.index, "names"
    try:
        ranks.on_rank_0(lambda: int("x"))
    except ValueError as error:
        print(ranks.on_rank_0(lambda: "read"), error)


def die(ranks: Ranks, task: str) -> None:
    ranks.barrier()
    if not ranks.is_main:
        print("gone", flush=True)
        os._exit(1)
    start = time.monotonic()
    try:
        if task == "barrier":
            ranks.barrier()
        else:
            ranks.sum_over_ranks(torch.ones(3))
    except LostRankError as error:
        print(error, time.monotonic() - start)


if __name__ == "__main__":
    joined = join_ranks("cpu")
    if sys.argv[1] == "agree":
        agree(joined)
    elif sys.argv[1] == "poison":
        poison(joined)
    elif sys.argv[1] == "share":
        share(joined)
    else:
        die(joined, sys.argv[1])
