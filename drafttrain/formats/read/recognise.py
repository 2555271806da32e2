"""Which kind of drafter a directory holds, and what that is seen by."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import Layout, UnknownKind, architectures_of
from drafttrain.formats.read.folder import Folder
from drafttrain.runtime.untrusted_input import shown


@dataclass(frozen=True)
class Recognised:
    """A layout of drafters, and by what it was recognised."""

    layout: Layout
    because: str

    @property
    def kind(self) -> str:
        """The layout's short name."""
        return self.layout.kind

    def __str__(self) -> str:
        return f"{self.layout.title}, by {self.because}"


def recognise(folder: Folder, own: Sequence[Layout] = ()) -> Recognised:
    """Say what a directory holds, by the strongest sign that any layout sees in it.

    own: layouts of the user's, asked before ours. Raises ValueError for what no part of this
    package can draft with, by its name.
    """
    layouts = [*own, *LAYOUTS]
    try:
        signs = [(layout.recognises(folder), layout) for layout in layouts]
    except UnknownKind as error:
        raise _unknown(folder, layouts, str(error)) from None
    found = [(sign, layout) for sign, layout in signs if sign is not None]
    if found:
        sign, layout = max(found, key=lambda pair: pair[0].strength)
        return Recognised(layout, sign.because)
    architectures = architectures_of(folder.config)
    what = f"model_type={shown(folder.config.get('model_type'))}"
    if architectures:
        what = f"architectures={architectures}"
    names = shown(", ".join(sorted(folder.names)[:3]))
    raise _unknown(folder, layouts, f"{what} and tensors such as {names}, which are")


def _unknown(folder: Folder, layouts: Sequence[Layout], what: str) -> ValueError:
    known = "; ".join(layout.title for layout in layouts)
    return ValueError(
        f"drafter.path={folder.path} has {what} not known here; it must be one of: {known}"
    )
