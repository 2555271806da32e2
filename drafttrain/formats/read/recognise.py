"""Recognise the kind of drafter in a directory."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import Layout, UnknownKind, architectures_of
from drafttrain.drafters.serving.speculators_layout import refuse_other_types
from drafttrain.formats.read.folder import Folder
from drafttrain.runtime.untrusted_input import shown


@dataclass(frozen=True)
class Recognised:
    """The layout of a drafter's directory, and the sign by which it was recognised."""

    layout: Layout
    because: str

    def __str__(self) -> str:
        return f"{self.layout.title}, by {self.because}"


def recognise(folder: Folder, layouts: Sequence[Layout] = LAYOUTS) -> Recognised:
    """Return the layout of a directory, by the strongest sign that any of `layouts` finds in it.

    Raises ValueError, naming its content, if this package cannot draft with it.
    """
    try:
        refuse_other_types(folder, layouts)
        signs = [(layout.recognises(folder), layout) for layout in layouts]
    except UnknownKind as error:
        raise _unknown(folder, str(error), layouts) from None
    found = [(sign, layout) for sign, layout in signs if sign is not None]
    if found:
        sign, layout = max(found, key=lambda pair: pair[0].strength)
        return Recognised(layout, sign.because)
    architectures = architectures_of(folder.config)
    what = f"model_type={shown(folder.config.get('model_type'))}"
    if architectures:
        what = f"architectures={architectures}"
    names = shown(", ".join(sorted(folder.names)[:3]))
    raise _unknown(folder, f"{what} and tensors such as {names}", layouts)


def _unknown(folder: Folder, what: str, layouts: Sequence[Layout]) -> ValueError:
    known = "; ".join(layout.title for layout in layouts)
    return ValueError(
        f"drafter.path={folder.path} has {what}: not a known drafter; it must be one of: {known}"
    )
