"""The references in every report: drafters without training, which a drafter must beat."""

from typing import Any

LOOKUP = "ngram"  # the entry of conf/drafter, and the method of a report


def beside_every(draft_model: str | None) -> dict[str, dict[str, Any]]:
    """Return entries of conf/drafter, and the settings changed in each.

    draft_model: a smaller language model, None for none.
    """
    return {LOOKUP: {}} | ({"two_model": {"path": draft_model}} if draft_model else {})
