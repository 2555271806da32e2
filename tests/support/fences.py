"""What every fuzz test shares: nasty inputs, and a fence that asserts what none of them may do.

    from fences import FUZZ, damaged, edited, fence, nasty_json   # fence is a fixture: import it

    pytestmark = pytest.mark.slow

    @FUZZ
    @given(content=damaged(edited(VALID)))
    def test_no_manifest_does_more_than_be_refused(fence: Fence, content: bytes) -> None:
        folder = fence.fresh()                      # empty, for this input alone
        (folder / "manifest.json").write_bytes(content)
        fence.holds(lambda: read_manifest(folder))

`fence.holds(work)` runs `work` and asserts of it

- that it ends in success or in a ValueError of one line (or what `foreseen` names) whose message
  a terminal can show;
- that it takes less than 5 s of the processor (and is interrupted at 30 s of the clock), and that
  it allocates less than 1 GB;
- that it opens, makes, changes and removes nothing outside `fence.fresh()`, and starts no process,
  opens no connection, unpickles no class;
- that what lies beside the folder is as it was. `fence.victims` are there to be named by inputs:
  a text file, weights in safetensors, JSON and a folder. `NAMES` names them, as an input would.

`edited(plain)` draws valid JSON with a few values of it replaced, removed or added, `nasty_json()`
anything that JSON can spell (and what Python takes for it), `damaged(content)` cuts, flips and
inserts bytes. 2,000 inputs a test, or FUZZ_EXAMPLES; the same ones each time up to 2,000, beyond
that other ones.
"""

import atexit
import copy
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SECONDS, AT_MOST = 5.0, 30.0  # of the processor, which others may use; of the clock
BYTES = 1_000_000_000
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2000"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,  # `Fence.holds` measures, without what it takes to draw
    database=None,
    derandomize=EXAMPLES <= 2000,
    suppress_health_check=list(HealthCheck),
)
VICTIM = "victim.txt"
# By its absolute path. Inputs name nothing that the machine needs: a test that fails may remove it.
ABSOLUTE = Path(tempfile.gettempdir()) / f"drafttrain-victim-{os.getpid()}.txt"
# From a folder of `Fence.fresh` to what lies beside it.
NAMES = (
    f"../{VICTIM}",
    "../victim.safetensors",
    "../victim.json",
    "../victims/",
    f"./../{VICTIM}",
    f"sub/../../{VICTIM}",
    str(ABSOLUTE),
    "~/drafttrain-victim",
    "..",
    ".",
    "",
    "a\nb",
    "a\x00b",
    "x" * 5000,
    "\x1b[2J",
    "shard-00000.safetensors\n",
    "$(id)",
    "${oc.env:HOME}",
)
NUMBERS = (
    *(0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**12, -(10**12), 10**30, 0.5, 1e308, -0.0),
    *(float("inf"), float("-inf"), float("nan"), 1e-320),
)
WORDS = (
    *NAMES,
    "true",
    "null",
    "1",
    "\ud800",
    "[/x]",
    "<script>",
    "{{ 7 * 7 }}",
    "🦆",
    "os.system",
)
DEEP = 20_000
NESTS = {"[": "]", '{"a":': "}"}  # texts that `as_bytes` writes as values nested DEEP times
OUT_OF_MEMORY = re.compile(r"allocat|out of memory|MemoryError|bad_alloc|Cannot allocate", re.I)
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
          "socket.connect", "socket.bind", "pickle.find_class")  # fmt: skip
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link",
           "os.symlink", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile")  # fmt: skip
# Where the arguments of these events have descriptors of folders.
DESCRIPTORS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "shutil.rmtree": 1, "os.mkdir": 2}


EDITS = st.sampled_from(("replace", "replace", "replace", "remove", "wrap", "add"))
KEYS = st.sampled_from((*WORDS, "_target_", "file", "__metadata__"))
DAMAGE = st.sampled_from(("whole", "whole", "whole", "cut", "flip", "insert"))
BYTES_PUT_IN = st.sampled_from((b"\x00", b"\xff", b"\n", b"\xed\xa0\x80", b"["))


class OverTheFenceError(BaseException):
    """What no input may do was done; no `except Exception` swallows it."""


@cache  # Hypothesis validates every strategy that is made anew, which takes longer than drawing
def scalars() -> st.SearchStrategy[Any]:
    """Draw what JSON has besides lists and objects, at its edges more than between them."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(NUMBERS),
        st.integers(),
        st.floats(),
        st.sampled_from(WORDS),
        st.text(max_size=20),
    )


@cache
def nasty_json() -> st.SearchStrategy[Any]:
    """Draw plain data: scalars, lists and objects of them, seldom nested very deeply."""
    keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
    shallow = st.recursive(
        scalars(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=8,
    )
    return st.one_of(shallow, shallow, shallow, st.sampled_from(list(NESTS)))


def as_bytes(plain: Any) -> bytes:
    """Return plain data as Python would write it: NaN, Infinity and lone surrogates as well."""
    text = json.dumps(plain, default=str)
    for opening, closing in NESTS.items():
        text = text.replace(json.dumps(opening), opening * DEEP + "1" + closing * DEEP)
    return text.encode()


@st.composite
def edited(
    draw: st.DrawFn, plain: Any, most: int = 3, sign: Callable[[Any], object] | None = None
) -> bytes:
    """Draw JSON that was valid, after up to `most` edits: values replaced, removed, added.

    sign: puts checksums right again, half of the time, as one who knows the format would.
    """
    plain = copy.deepcopy(plain)
    for _ in range(draw(st.integers(0, most))):
        places = list(_places(plain))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(EDITS)
        if kind == "replace":
            holder[key] = draw(nasty_json())
        elif kind == "remove":
            del holder[key]
        elif kind == "wrap":
            wrapped = ([holder[key]], {"a": holder[key]}, [], {})
            holder[key] = wrapped[draw(st.integers(0, 3))]
        elif isinstance(holder, list):
            holder.insert(
                key, copy.deepcopy(holder[key]) if draw(st.booleans()) else draw(nasty_json())
            )
        else:
            holder[draw(KEYS)] = draw(nasty_json())
    if sign is not None and draw(st.booleans()):
        with suppress(LookupError, TypeError, AttributeError, ValueError, RecursionError):
            sign(plain)  # where what is to be signed is still there
    another = most and draw(st.integers(0, 2)) == 2
    return as_bytes(draw(nasty_json()) if another else plain)


def _places(plain: Any) -> Iterator[tuple[Any, Any]]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for key, value in list(items):
        yield plain, key
        if isinstance(value, dict | list):
            yield from _places(value)


@st.composite
def damaged(draw: st.DrawFn, content: st.SearchStrategy[bytes]) -> bytes:
    """Draw content, half of the time cut off, with bits flipped, or with bytes put in."""
    found = bytearray(draw(content))
    kind = draw(DAMAGE)
    place = draw(st.integers(0, max(0, len(found) - 1)))
    if kind == "cut":
        del found[place:]
    elif kind == "flip" and found:
        found[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "insert":
        found[place:place] = draw(BYTES_PUT_IN)
    return bytes(found)


@st.composite
def safetensors(draw: st.DrawFn, header: st.SearchStrategy[bytes], data: bytes) -> bytes:
    """Draw a safetensors file of such a header; its length, and its data, not always true."""
    text = draw(header)
    true = len(text)
    length = draw(
        st.sampled_from((true, true, true, true, true - 1, 0, 2**32, 2**63 - 1, 2**64 - 1))
    )
    content = draw(st.sampled_from((data, data, data, data, data[:-1], data + b"\0", b"")))
    return struct.pack("<Q", max(0, length)) + text + content


class Fence:
    """A folder for inputs with victims beside it, and what must hold of whoever reads them."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self.inside = self.base / "inside"
        self.victims = [self.base / name for name in (VICTIM, "victim.safetensors", "victim.json")]
        self.victims[0].write_text("what nobody may touch\n")
        header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        self.victims[1].write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
        self.victims[2].write_text("{}")
        (self.base / "victims").mkdir()
        (self.base / "victims" / VICTIM).write_text("nor this\n")
        self.victims += [self.base / "victims", self.base / "victims" / VICTIM, ABSOLUTE]
        ABSOLUTE.write_text("nor this\n")
        atexit.register(ABSOLUTE.unlink, missing_ok=True)
        self.up = False
        sys.addaudithook(self._audit)

    def fresh(self) -> Path:
        """Return the folder, emptied."""
        shutil.rmtree(self.inside, ignore_errors=True)
        self.inside.mkdir()
        return self.inside

    def holds(
        self, work: Callable[[], Any], foreseen: tuple[type[Exception], ...] = (ValueError,)
    ) -> Any:
        """Run `work` inside the fence; return its result, or the foreseen error that it raised."""
        for victim in self.victims:  # older than its content, so that reading it shows
            os.utime(victim, ns=(0, victim.stat().st_mtime_ns))
        before = self._seen()
        started = time.process_time()
        with self._raised():
            try:
                result = work()
            except foreseen as error:
                result = error
        assert time.process_time() - started < SECONDS
        assert self._seen() == before, "what lies beside the folder was touched"
        if isinstance(result, Exception):
            message = str(result)
            assert not OUT_OF_MEMORY.search(message), message
            assert message, repr(result)
            assert message.isprintable(), f"not one line that can be shown: {message!r}"
            assert len(message) < 2000, message
        return result

    def _seen(self) -> list[tuple[int, ...]]:
        stats = [victim.lstat() for victim in (self.base, *self.victims)]
        return [
            (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
            + ((s.st_atime_ns,) if os.path.isfile(victim) else ())
            for s, victim in zip(stats, (self.base, *self.victims), strict=True)
        ]

    @contextmanager
    def _raised(self) -> Iterator[None]:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        earlier = signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AT_MOST)
        resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, limits[1]))
        self.up = True
        try:
            yield
        finally:
            self.up = False
            resource.setrlimit(resource.RLIMIT_AS, limits)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, earlier)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.up:
            return
        if event in STARTS:
            raise OverTheFenceError(f"{event}{arguments!r}"[:500])
        if event in CHANGES or (event == "open" and _writes(arguments)):
            for number, place in enumerate(arguments[:2]):
                if not isinstance(place, str | bytes | os.PathLike):
                    continue
                for at in arguments[DESCRIPTORS.get(event, 9) + number :][:1]:
                    if isinstance(at, int) and at >= 0:  # the folder that the path begins in
                        place = os.path.join(f"/proc/self/fd/{at}", os.fsdecode(place))
                if not self._within(place):
                    raise OverTheFenceError(f"{event}{arguments!r}"[:500])
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            place = Path(os.path.realpath(os.fsdecode(arguments[0])))
            foreign = place.is_relative_to(self.base) and not place.is_relative_to(self.inside)
            if foreign or place == ABSOLUTE:
                raise OverTheFenceError(f"{event}{arguments!r}"[:500])

    def _within(self, place: Any) -> bool:
        name = os.fsdecode(place)
        # The parent is resolved, the entry itself is not: unlinking a link is unlinking the link.
        real = Path(os.path.realpath(os.path.dirname(name) or ".")) / os.path.basename(name)
        return real.is_relative_to(self.inside) or name in ("r", "w", "a", "rb", "wb", "ab")


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    name = arguments[0]
    if isinstance(name, int) or os.fsdecode(name) in ("/dev/null", "/dev/tty"):
        return False
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise OverTheFenceError(f"still at work after {AT_MOST} s")


@pytest.fixture(scope="session")
def fence(tmp_path_factory: pytest.TempPathFactory) -> Fence:
    """A fence for the whole session: its folder is emptied for each input."""
    return Fence(tmp_path_factory.mktemp("fence"))
