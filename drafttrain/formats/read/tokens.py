"""Check whether a drafter's tokens are the target's, one by one."""

import json
from pathlib import Path
from typing import Any

from drafttrain.drafters.shared.vocabularies import tokens_by_id
from drafttrain.runtime.untrusted_input import shown

SHOWN = 3


def compare_tokenizers(folder: Path, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Return (complaints, notes): where the tokenizer that a directory ships differs.

    Ids that only one of them has do not count: a fine-tune adds tokens at free ids.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        if any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
            return [], ["its tokenizer was not compared: it comes without tokenizer.json"]
        return [], []
    from tokenizers import Tokenizer

    try:
        theirs = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        return [f"tokenizer.json cannot be read ({shown(error)})"], []
    mine = tokens_by_id(tokenizer)
    differing = sorted(
        (index, token) for token, index in theirs.items() if mine.get(index, token) != token
    )
    if not differing:
        return [], []
    first = ", ".join(
        f"id {index} is {json.dumps(token)} to the drafter and {json.dumps(mine[index])} to the "
        "target"
        for index, token in differing[:SHOWN]
    )
    return [f"its tokenizer differs in {len(differing):,} tokens: {first}"], []
