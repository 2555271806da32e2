"""The next steps, prepared in the background while the current one is computed."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.data.batches import Batches, StepGroup


class Prefetcher:
    """Batches that a thread prepares `ahead` steps early, with their features if `read` is given.

    Its position is that of the steps handed out: a resumed run repeats none and skips none. An
    error in the thread is raised when its step is asked for. ahead=0: without a thread.
    """

    def __init__(
        self,
        batches: Batches,
        ahead: int,
        read: Callable[[Batch], TargetFeatures] | None = None,
    ) -> None:
        self.batches, self.ahead, self.read = batches, ahead, read
        self.position = batches.state_dict()
        self._thread: ThreadPoolExecutor | None = None
        self._ready: deque[Future[tuple[StepGroup, dict[str, Any]]]] = deque()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_group(self) -> StepGroup:
        """Return the next optimizer step."""
        if self.ahead == 0:
            group, self.position = self._make()
            return group
        self._thread = self._thread or ThreadPoolExecutor(1, "prefetch")
        while len(self._ready) < self.ahead + 2:  # one to hand out, and one in preparation
            self._ready.append(self._thread.submit(self._make))
        try:
            group, self.position = self._ready[0].result()
        except BaseException:
            self.close()
            raise
        self._ready.popleft()
        return group

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step handed out."""
        return self.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; prepared steps are dropped."""
        self.close()
        self.batches.load_state_dict(state)
        self.position = self.batches.state_dict()

    def close(self) -> None:
        """End the thread; the next step is the one after the last step handed out."""
        if self._thread is None:
            return
        self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ready.clear()
        self.batches.load_state_dict(self.position)

    def _make(self) -> tuple[StepGroup, dict[str, Any]]:
        group = self.batches.next_group()
        if self.read is not None:
            group = replace(group, features=tuple(map(self.read, group.batches)))
        return group, self.batches.state_dict()
