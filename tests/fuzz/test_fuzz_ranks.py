"""Whatever a rank's settings differ in, the ranks are stopped, and setting and rank are named."""

import copy
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fences import FUZZ, KEYS, Fence, fence, nasty_json
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import COMMANDS
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.run_folder import common_to_ranks

__all__ = ["fence"]

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Gathered(Ranks):
    """Ranks whose records have been exchanged, as JSON."""

    records: tuple[str, ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        return [json.loads(record) for record in self.records]


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    config = typed(compose("train", ["drafter=medusa", "hardware=cpu"]), COMMANDS["train"])
    return json.loads(json.dumps(common_to_ranks("train", config, "float32")))


def leaves(plain: Any) -> list[tuple[Any, Any]]:
    """Return every place of plain data that holds a value: what holds it, and its key there."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    found = []
    for key, value in items:
        found += [(plain, key), *(leaves(value) if isinstance(value, dict | list) else ())]
    return found


@FUZZ
@given(data=st.data())
def test_ranks(fence: Fence, settings: dict[str, Any], data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    records = [copy.deepcopy(settings) for _ in range(size)]
    other = data.draw(st.integers(1, size - 1))
    if data.draw(st.booleans()):
        places = leaves(records[other])
        holder, key = places[data.draw(st.integers(0, len(places) - 1))]
        holder[key] = data.draw(nasty_json())
    else:
        records[other][data.draw(KEYS)] = data.draw(nasty_json())
    changed = [
        key
        for key in settings | records[other]
        if json.dumps(settings.get(key)) != json.dumps(records[other].get(key))
    ]
    ranks = Gathered(0, 0, size, CPU, records=tuple(map(json.dumps, records)))
    error = fence.holds(lambda: ranks.require_equal(settings))
    if not changed:
        assert error is None
        return
    assert isinstance(error, ValueError)
    named = changed[0] if re.fullmatch(r"[\w. ]{1,100}", changed[0]) else ""
    assert str(error).startswith(f"{named} must be the same on every rank" if named else "")
    assert f" on rank {other}; start every rank" in str(error)
