"""The layouts of a user's own drafters, by which directories that they exported are recognised."""

from drafttrain.config.groups import choices, content_of, own_file
from drafttrain.config.values import class_of
from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import ServedLayout


def own_layouts() -> tuple[ServedLayout, ...]:
    """Return the layout of each class that a yaml of --config-dir names, if it is the class's own.

    It is if its `family` is the name of the yaml, and its first architecture is none of the
    package's.
    """
    ours = {
        name
        for layout in LAYOUTS
        if isinstance(layout, ServedLayout)
        for name in layout.architectures
    }
    found: list[ServedLayout] = []
    for name in choices("drafter"):
        if own_file("drafter", name) is None:
            continue
        try:
            layout = class_of("drafter", content_of("drafter", name).get("_target_")).layout
        except Exception:  # of a file that this command was not told to use
            continue
        if layout is None or layout.family != name:
            continue
        if layout.architectures and layout.architectures[0] not in ours:
            found.append(layout)
    return tuple(found)
