"""Compare two tokenizers: where they differ, and which tokens they share."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from drafttrain.core.tokenizer import text_of, token_ids

SHOWN = 5  # differing ids that a message lists
REPLACEMENT = "\ufffd"  # the decoding of a part of a character
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Return every token of a tokenizer by id, as the tokenizer writes it, added ones included."""
    return {index: token for token, index in tokenizer.get_vocab().items()}


def check_same(target: Any, own: Any, who: str) -> None:
    """Raise ValueError unless two tokenizers have the same token for every id."""
    theirs, ours = tokens_by_id(target), tokens_by_id(own)
    differing = [i for i in sorted(theirs | ours) if theirs.get(i) != ours.get(i)]
    if not differing:
        return
    shown = "; ".join(
        f"id {i} is {_quoted(theirs.get(i))} for the target, {_quoted(ours.get(i))} for the drafter"
        for i in differing[:SHOWN]
    )
    raise ValueError(
        f"{who} must have the target's vocabulary, but {len(differing):,} of "
        f"{len(theirs | ours):,} ids differ: {shown}{'; ...' * (len(differing) > SHOWN)}; set "
        "drafter.vocabulary=intersection to draft the tokens that both have"
    )


def _quoted(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


@dataclass(frozen=True)
class Shared:
    """Tokens of two vocabularies with the same text, and how to read the others."""

    target_ids: Int[Tensor, " shared"]  # ascending
    draft_ids: Int[Tensor, " shared"]
    spelled: dict[int, list[int]]  # target id -> draft ids, for target ids that are not shared


def intersection(target: Any, own: Any, target_size: int, own_size: int, who: str) -> Shared:
    """Return pairs of the tokens of two tokenizers: each target token with at most one own token.

    First those that both write alike, then those that decode to the same text (a space is `▁` in
    one family and `Ġ` in another), then special tokens of the same role. A target token without a
    partner is read as the drafter's own encoding of its text, or as its unknown token if the text
    is part of a character. Sizes are those of the models' logits.
    """
    theirs = {i: t for i, t in tokens_by_id(target).items() if i < target_size}
    ours = {i: t for i, t in tokens_by_id(own).items() if i < own_size}
    their_text, our_text = spellings(target, list(theirs)), spellings(own, list(ours))
    partner: dict[int, int] = {}
    free = dict.fromkeys(ours)
    for by_text in (False, True):

        def key(token: str, text: str, by_text: bool = by_text) -> Any:
            return text if by_text else (token, text)

        index: dict[Any, int] = {}
        for i in free:
            if not by_text or REPLACEMENT not in our_text[i]:
                index.setdefault(key(ours[i], our_text[i]), i)
        for i in sorted(theirs):
            found = None if i in partner else index.pop(key(theirs[i], their_text[i]), None)
            if found is not None:
                partner[i] = found
                del free[found]
    for role in ROLES:
        one, other = getattr(target, role, None), getattr(own, role, None)
        if one in theirs and one not in partner and other in free:
            partner[one] = other
            del free[other]
    if not partner:
        raise ValueError(
            f"{who} shares no token with the target, so it can draft nothing; choose a drafter "
            "whose tokenizer is nearer to the target's"
        )
    unknown = _stand_in(own, own_size)
    spelled = {}
    for i in theirs.keys() - partner.keys():
        ids = []
        if REPLACEMENT not in their_text[i]:
            ids = [k for k in token_ids(own, their_text[i], special=False) if k < own_size]
        spelled[i] = ids or [unknown]
    ids = sorted(partner)
    return Shared(torch.tensor(ids), torch.tensor([partner[i] for i in ids]), spelled)


def spellings(tokenizer: Any, ids: list[int]) -> dict[int, str]:
    """Return the text that each token adds when it is not the first."""
    # Decoded after another token: the first token of a text may lose its space.
    anchor = next(iter(token_ids(tokenizer, "a", special=False)), None)
    lead = [] if anchor is None else [anchor]
    settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    start = len(text_of(tokenizer, lead, **settings)) if lead else 0
    return {i: text_of(tokenizer, [*lead, i], **settings)[start:] for i in ids}


def _stand_in(tokenizer: Any, size: int) -> int:
    """Return the id for text that the drafter cannot read."""
    for name in ("unk_token_id", "pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None and value < size:
            return value
    return 0
