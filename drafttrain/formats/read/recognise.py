"""Recognise the kind of drafter in a directory."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import (
    Layout,
    ServedLayout,
    UnknownKind,
    architectures_of,
)
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


def recognise(folder: Folder, own: Sequence[ServedLayout] = ()) -> Recognised:
    """Return the layout of a directory, by the strongest sign that any layout finds in it.

    own: of a user's drafters. One whose architecture config.json names comes before the package's,
    which may find signs of their own in it.
    Raises ValueError, naming its content, if this package cannot draft with it.
    """
    named = architectures_of(folder.config)
    layouts = [*(layout for layout in own if layout.architectures[0] in named), *LAYOUTS]
    try:
        refuse_other_types(folder, layouts)
        signs = [(layout.recognises(folder), layout) for layout in layouts]
    except UnknownKind as error:
        raise _unknown(folder, str(error), own) from None
    found = [(sign, layout) for sign, layout in signs if sign is not None]
    if found:
        sign, layout = max(found, key=lambda pair: pair[0].strength)
        return Recognised(layout, sign.because)
    what = f"model_type={shown(folder.config.get('model_type'))}"
    if named:
        what = f"architectures={named}"
    names = shown(", ".join(sorted(folder.names)[:3]))
    raise _unknown(folder, f"{what} and tensors such as {names}", own)


def _unknown(folder: Folder, what: str, own: Sequence[ServedLayout]) -> ValueError:
    known = "; ".join(layout.title for layout in (*own, *LAYOUTS))
    return ValueError(
        f"drafter.path={folder.path} has {what}: not a known drafter; it must be one of: {known}"
    )
