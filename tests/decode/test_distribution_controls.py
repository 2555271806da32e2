"""Every mistake, put into the real loop, is caught by the check that the loop passes."""

from dataclasses import replace

import pytest
from distribution_controls import CONTROLS, Control
from distribution_replay import EXACT, deviation
from distribution_support import Small, drafter_for
from tree_controls import TREE_CONTROLS

from drafttrain.decode.verify import LOSSLESS

EVERY = [*CONTROLS, *TREE_CONTROLS]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A target of three tokens."""
    return Small.make(tmp_path_factory.mktemp("controls"), 3)


@pytest.mark.parametrize("control", EVERY, ids=lambda c: c.name.replace(" ", "_"))
def test_the_mistake_is_caught(
    control: Control, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_for(control.drafter, small)
    control.plant(monkeypatch)
    assert deviation(small, drafter, control.case, control.width) > control.at_least


def test_without_a_mistake_each_of_these_settings_is_exact(small: Small) -> None:
    settings = {(c.drafter, replace(c.case, rule=LOSSLESS), c.width) for c in EVERY}
    assert len(settings) > 10
    for name, case, width in settings:
        assert deviation(small, drafter_for(name, small), case, width) <= EXACT
