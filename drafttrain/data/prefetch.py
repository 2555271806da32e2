"""The steps to come, made ready in the background while the current one is computed."""

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.data.batches import Batches, StepGroup

PATIENCE_S = 0.2  # how long the thread waits for room before it looks whether it should end


class Prefetcher:
    """Batches that come `ahead` steps early from a thread, with their features where `read` is.

    Its position is that of the steps handed out, whatever the thread has made besides: a resumed
    run repeats none and skips none. What goes wrong in the thread is raised where the step that it
    belongs to is asked for. ahead=0: everything happens when it is asked for, without a thread.
    """

    def __init__(
        self,
        batches: Batches,
        ahead: int,
        read: Callable[[Batch], TargetFeatures] | None = None,
    ) -> None:
        self.batches = batches
        self.ahead = ahead
        self.read = read
        self.position = batches.state_dict()
        self._ready: queue.Queue[tuple[StepGroup | BaseException, dict[str, Any]]]
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_group(self) -> StepGroup:
        """Return the next optimizer step."""
        if self.ahead == 0:
            group = self._make()
            self.position = self.batches.state_dict()
            return group
        if self._thread is None:
            self._start()
        made, position = self._ready.get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        self.position = position
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step handed out."""
        return self.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; steps made ready are dropped."""
        self.close()
        self.batches.load_state_dict(state)
        self.position = self.batches.state_dict()

    def close(self) -> None:
        """End the thread; the next step then begins where the last one handed out ended."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        self.batches.load_state_dict(self.position)

    def _start(self) -> None:
        self._over.clear()
        self._ready = queue.Queue(self.ahead)
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _make(self) -> StepGroup:
        group = self.batches.next_group()
        if self.read is None:
            return group
        return replace(group, features=tuple(map(self.read, group.batches)))

    def _run(self) -> None:
        made: StepGroup | BaseException
        while not self._over.is_set():
            try:
                made = self._make()
            except BaseException as error:  # for the main thread to raise
                made = error
            item = (made, self.batches.state_dict())
            while not self._over.is_set():
                try:
                    self._ready.put(item, timeout=PATIENCE_S)
                    break
                except queue.Full:
                    continue
            if isinstance(made, BaseException):
                return
