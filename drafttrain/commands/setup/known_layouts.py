"""The layouts by which a directory is recognised: the package's, and those of a user's drafters."""

from drafttrain.config.groups import choices, content_of, own_file
from drafttrain.config.overrides import UsageError
from drafttrain.config.values import class_of
from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import Layout


def known_layouts() -> tuple[Layout, ...]:
    """Return them in the order in which equally strong signs decide, a user's own first.

    A user's own is the `layout` of a class that a yaml of --config-dir names; a broken yaml there
    is passed over, as it is by every command that was not told to take it.
    """
    ours = {type(layout) for layout in LAYOUTS}
    own: list[Layout] = []
    for name in choices("drafter"):
        if own_file("drafter", name) is None:
            continue
        try:
            layout = class_of("drafter", content_of("drafter", name).get("_target_")).layout
        except UsageError:
            continue
        if layout is not None and type(layout) not in ours:
            ours.add(type(layout))
            own.append(layout)
    return (*own, *LAYOUTS)
