"""A run that is killed and resumed, again and again, beside one that is left alone.

As a script: `python lives.py kill|stop FOLDER TIMES RANKS SEED [override ...] [-- override ...]`
trains undisturbed, then kills ranks with SIGKILL, or asks them to stop, at so many instants,
compares, and prints what it saw as a line of JSON; then the same for the overrides after each --.
Torch is imported once and every life is a fork: it costs a fraction of a second.
"""

import faulthandler
import json
import mmap
import os
import random
import re
import shutil
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTING, STEP, VALIDATING, SAVING, PRUNING, METRICS, ENDING = range(7)
PHASES = ("starting", "step", "validation", "saving", "pruning", "metrics", "ending")
# Where to strike: mostly anywhere, and on purpose where time alone would seldom lead. The first
# time (the second of these) there is a checkpoint to resume from.
AIMS = (None, PRUNING, METRICS, SAVING, None, VALIDATING, STARTING, None)
MOST_STEPS = 6  # of a life: the run is not over before it has been killed often enough
PATIENCE_S = 90.0  # while this process runs: one that is stopped for a while may be stopped


def settings(run: Path, data: Path, *more: str) -> list[str]:
    """The command line of a run of 40 steps with much to interrupt."""
    drawn = [
        "model=random", "model.vocab_size=4096", "model.hidden_size=32", "model.head_dim=8",
        "model.num_layers=3",
    ]  # fmt: skip
    if any(override.startswith("model.path=") for override in more):
        drawn = []  # a target that is read
    return [
        "train", f"run.dir={run}", "run.resume=true", *drawn, "drafter=eagle", "data=jsonl",
        f"data.path={data}", "data.holdout=2", "hardware=cpu", "hardware.threads=1",
        "hardware.micro_batch=2", "trainer.max_steps=40", "trainer.tokens_per_step=128",
        "trainer.save_every=3", "trainer.log_every=2", "trainer.validate_every=7",
        "trainer.validation_prompts=2", "trainer.validation_tokens=6", *more,
    ]  # fmt: skip


def write_conversations(path: Path, count: int = 30) -> None:
    """Conversations of unlike lengths; an epoch is a few steps."""
    with path.open("w") as file:
        for number in range(count):
            answer = f"{number} plus {number} is {2 * number}. " * (1 + number % 3)
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


class Board:
    """What each rank is doing and how many steps this life has taken, in memory that all share."""

    def __init__(self, ranks: int) -> None:
        self.memory = mmap.mmap(-1, 8 * ranks)

    def phase(self, rank: int) -> int:
        return struct.unpack_from("i", self.memory, 8 * rank)[0]

    def steps(self, rank: int) -> int:
        return struct.unpack_from("i", self.memory, 8 * rank + 4)[0]

    def enter(self, rank: int, phase: int) -> None:
        struct.pack_into("i", self.memory, 8 * rank, phase)

    def count(self, rank: int, steps: int) -> None:
        struct.pack_into("i", self.memory, 8 * rank + 4, steps)

    def watch(self, rank: int, owner: Any, name: str, phase: int) -> None:
        """Let a function say when it runs; what it does stays as it is."""
        real = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            before = self.phase(rank)
            self.enter(rank, phase)
            try:
                return real(*arguments, **named)
            finally:
                self.enter(rank, before)
                if phase == STEP:
                    self.count(rank, self.steps(rank) + 1)

        setattr(owner, name, watched)

    def watch_all(self, rank: int) -> None:
        import drafttrain.training.loop
        from drafttrain.runtime import tracker
        from drafttrain.training.checkpoint import Checkpoints
        from drafttrain.training.validation import Validation

        self.watch(rank, drafttrain.training.loop, "optimizer_step", STEP)
        self.watch(rank, Validation, "__call__", VALIDATING)
        self.watch(rank, Checkpoints, "save", SAVING)
        self.watch(rank, Checkpoints, "_prune", PRUNING)
        self.watch(rank, tracker, "append_records", METRICS)
        self.watch(rank, tracker, "replace_records", METRICS)


def warm_up(with_deepspeed: bool) -> None:
    """Import what every life needs, and compute nothing: threads do not survive a fork."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import drafttrain.commands.train
    import drafttrain.drafters.eagle
    import drafttrain.drafters.eagle3  # noqa: F401

    if with_deepspeed:
        import deepspeed  # noqa: F401


def begin(board: Board, rank: int, ranks: int, port: int, command: list[str], log: Path) -> int:
    """Fork a process that trains; return its id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        faulthandler.enable()  # a process that hangs is aborted, and says where
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import drafttrain.__main__ as cli
        from drafttrain.runtime.ranks import _leave

        cli.speaks_first = lambda: True  # lives have one parent, which is no launcher
        board.watch_all(rank)
        code = cli.main(command)
        sys.stdout.flush()
        board.enter(rank, ENDING)
        _leave()
    finally:
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Life:
    """The processes of one run between two kills."""

    def __init__(self, board: Board, ranks: int, command: list[str], logs: Path) -> None:
        self.board, self.ranks, self.logs = board, ranks, logs
        port = free_port()
        for rank in range(ranks):
            board.enter(rank, STARTING)
            board.count(rank, 0)
        self.running = {
            rank: begin(board, rank, ranks, port, command, self.log(rank)) for rank in range(ranks)
        }
        self.codes: dict[int, int] = {}

    def log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def poll(self) -> bool:
        """Whether any process still runs."""
        for rank, process in list(self.running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                del self.running[rank]
        return bool(self.running)

    def polls(self, pause: float) -> Iterator[None]:
        """Yield again and again while a process runs; AssertionError where it takes too long."""
        waited, last = 0.0, time.monotonic()
        while self.poll():
            now = time.monotonic()
            waited, last = waited + min(now - last, 1.0), now
            if waited > PATIENCE_S:
                self.send(signal.SIGABRT)
                time.sleep(1.0)
                self.send(signal.SIGKILL)
                raise AssertionError("a process did not end:\n" + self.said())
            yield
            time.sleep(pause)

    def wait(self) -> None:
        for _ in self.polls(0.002):
            pass

    def send(self, number: int, ranks: list[int] | None = None) -> None:
        for rank in list(self.running) if ranks is None else ranks:
            if rank in self.running:
                os.kill(self.running[rank], number)

    def said(self) -> str:
        logs = [self.log(rank) for rank in range(self.ranks)]
        return "\n".join(log.read_text() for log in logs if log.exists())

    def until(self, strike: int | None, most_steps: int, delay: float) -> None:
        """Wait for a phase of rank 0, or some steps and a while; or until it ends by itself."""
        for _ in self.polls(0.0002):
            if len(self.running) < self.ranks:
                break
            if strike is not None and self.board.phase(0) == strike:
                break
            if self.board.steps(0) >= (MOST_STEPS + 2 if strike else most_steps):
                break
        time.sleep(delay)


def disturb_and_resume(
    task: str, folder: Path, times: int, ranks: int, seed: int, more: list[str]
) -> dict[str, Any]:
    """Return what was seen: where signals landed, how survivors ended, seconds."""
    started = time.monotonic()
    data = folder / "data.jsonl"
    write_conversations(data)
    board, chance = Board(ranks), random.Random(seed)
    if "features=stored" in more:
        of_train = settings(folder / "none", data)
        own = ("model", "drafter", "data", "hardware")
        overrides = [text for text in of_train if text.split(".")[0].split("=")[0] in own]
        capture = ["capture", f"store.dir={folder / 'store'}", *overrides]
        capturing = Life(board, 1, capture, folder)
        capturing.wait()
        assert capturing.codes == {0: 0}, capturing.said()
        more = [*more, f"features.dir={folder / 'store'}"]
    alone = Life(board, ranks, settings(folder / "alone", data, *more), folder)
    alone.wait()
    assert set(alone.codes.values()) == {0}, alone.said()
    command = settings(folder / "killed", data, *more)
    landed: Counter[str] = Counter()
    lost = []  # seconds that survivors took to see that another rank was gone
    lives = 0
    while True:
        life = Life(board, ranks, command, folder)
        lives += 1
        if landed.total() < times:
            aim = AIMS[lives % len(AIMS)]
            if aim == STARTING:
                time.sleep(chance.uniform(0, 0.3))
            else:
                life.until(aim, chance.randint(1, MOST_STEPS), chance.uniform(0, 0.01))
            victims = sorted(chance.sample(range(ranks), chance.randint(1, ranks)))
            if STARTING in map(board.phase, range(ranks)):
                # Ranks that have not met do not miss each other: a launcher ends them, as here.
                victims = list(range(ranks))
            life.send(signal.SIGSTOP, victims)  # what the board says is then where it dies
            where = PHASES[board.phase(victims[0])]
            struck_ranks = [rank for rank in victims if rank in life.running]
            if task == "stop":
                life.send(chance.choice([signal.SIGTERM, signal.SIGUSR1]), victims)
                life.send(signal.SIGCONT, victims)
            else:
                life.send(signal.SIGKILL, victims)
            struck = time.monotonic()
        else:
            struck_ranks = []
        life.wait()
        if set(life.codes.values()) == {0}:  # nobody was struck, or too late to stop
            compare(folder / "alone", folder / "killed")
            if landed.total() >= times:
                break
            shutil.rmtree(folder / "killed")  # its end came first: another one is struck
            continue
        landed[where] += 1
        if task == "stop":
            check_stopped(life, folder / "killed", where)
            lost.append(round(time.monotonic() - struck, 2))
            continue
        killed = struck_ranks
        assert all(life.codes[rank] == -signal.SIGKILL for rank in killed), life.codes
        for rank in set(range(ranks)) - set(killed):
            assert life.codes[rank] == 1, (life.codes, life.said())
            assert "lost another of the" in life.log(rank).read_text(), life.said()
            lost.append(round(time.monotonic() - struck, 2))
    return {
        "times": landed.total(),
        "landed": dict(landed),
        "slowest_end_s": max(lost, default=None),
        "seconds": round(time.monotonic() - started, 1),
    }


def check_stopped(life: Life, run: Path, where: str) -> None:
    """Assert that every rank left with 143, and that the step rank 0 speaks of is the one saved."""
    from drafttrain.training.checkpoint import Checkpoints, load_state

    if where == "starting":  # Python's own end, before the program listens, is as good
        assert set(life.codes.values()) <= {143, -signal.SIGTERM, -signal.SIGUSR1}, life.said()
        return
    assert set(life.codes.values()) == {143}, (where, life.codes, life.said())
    said = re.search(r"after step (\d+) of \d+, which is saved; resume", life.log(0).read_text())
    if said is None:
        assert "outside the steps of training" in life.said(), life.said()
        return
    latest = Checkpoints(run / "checkpoints", 2).latest()
    assert latest is not None
    assert load_state(latest).step == int(said[1])


def curve(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what a clock says."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and "perf/" not in k} for row in rows]


def compare(alone: Path, other: Path) -> None:
    """Assert that two runs are the same to the bit: curves, weights, optimizer, position, best."""
    from drafttrain.training.checkpoint import Checkpoints, load_state, verify

    assert curve(other) == curve(alone)
    pair = [Checkpoints(run / "checkpoints", 2) for run in (alone, other)]
    for place in (Checkpoints.latest, Checkpoints.best):
        one, two = (place(checkpoints) for checkpoints in pair)
        assert one is not None
        assert two is not None
        verify(two)
        for file in ("drafter.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (two / file).read_bytes(), (two, file)
        states = [vars(load_state(checkpoint)) for checkpoint in (one, two)]
        for state in states:
            state["extra"]["meter"].pop("busy_s")
            state["extra"]["meter"].pop("wait_s")
        assert states[0] == states[1]
    steps = [sorted({p.name[:11] for p in c.folder.glob("step-*")}) for c in pair]
    assert steps[0] == steps[1]


if __name__ == "__main__":
    what, place, number, world, drawn = sys.argv[1:6]
    warm_up(any("=zero" in text for text in sys.argv[6:]))
    groups: list[list[str]] = [[]]
    for text in sys.argv[6:]:
        if text == "--":
            groups.append([])
        else:
            groups[-1].append(text)
    for count, group in enumerate(groups):
        run = Path(place) / str(count)
        run.mkdir(parents=True)
        seen = disturb_and_resume(what, run, int(number), int(world), int(drawn) + count, group)
        print(json.dumps({"overrides": group, **seen}), flush=True)
