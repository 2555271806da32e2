"""Hydra's composition, faster: what the same choices give is composed once in a session of tests.

Composing takes a tenth of a second, almost all of it for the choices. Most tests compose the same
ones and set other values.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from drafttrain.config.groups import command_groups, conf_dir, own_dir
from drafttrain.config.overrides import SAVED

MOST = 64  # compositions that are remembered; one takes half a megabyte


class ComposedOnce:
    """`hydra.compose` for conf/: it remembers what choices give, and sets values in a copy."""

    def __init__(self, compose: Callable[..., DictConfig]) -> None:
        self.compose = compose
        self._composed: dict[Any, DictConfig] = {}

    def __call__(self, head: str, overrides: Sequence[str]) -> DictConfig:
        """Return what Hydra composes, or raise what it raises."""
        if own_dir() is not None:  # its yaml is another one in each test
            return self.compose(head, list(overrides))
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        choices, values = [], []
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            group = loader.repository.group_exists(override.key_or_group)
            (choices if group and not isinstance(override.value(), dict) else values).append(
                override
            )
        chosen = command_groups(head) | {each.key_or_group: each.value() for each in choices}
        texts = [str(each.input_line) for each in choices]
        key = (conf_dir(), head, *texts, *saved_sections(chosen))
        config = self._composed.pop(key, None)
        config = self.compose(head, texts) if config is None else config
        self._composed[key] = config  # now the newest
        if len(self._composed) > MOST:
            del self._composed[next(iter(self._composed))]
        config = copy.deepcopy(config)
        try:
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
        except Exception:  # which Hydra words
            return self.compose(head, list(overrides))
        return config


def saved_sections(chosen: Mapping[str, Any]) -> list[str]:
    """Return what a run's config.yaml holds of the sections that are to be as it says."""
    store = ConfigStore.instance().repo
    saved = [store.get(group, {}) for group, choice in chosen.items() if choice == SAVED]
    return [repr(getattr(nodes.get(f"{SAVED}.yaml"), "node", None)) for nodes in saved]
