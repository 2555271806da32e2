"""On-policy distillation: the drafter's own samples in place of some answers.

GKD (Agarwal et al., 2023, arXiv:2306.13649) and DistillSpec (Zhou et al., 2023, arXiv:2310.08461)
train on text sampled from the drafter, with the target's distributions: the states it will meet.
"""

from dataclasses import dataclass

import torch

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.ops.ragged_cache import RaggedCache, padded_rows
from drafttrain.core.placed_batch import host_of, placed
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import PAD_DOCUMENT, Batch
from drafttrain.drafters.base import TrainingChance
from drafttrain.drafters.shared.causal import CausalDrafter

CHANGE, TURN = draw_of(0, Purpose.ACCEPT), draw_of(0, Purpose.DRAFT)
EMIT = draw_of(0, Purpose.EMIT)


@dataclass(frozen=True)
class Answer:
    """One answer of a conversation in a batch, and the space for a new one."""

    row: int
    conversation: int
    first: int  # where the conversation begins in its row
    start: int  # where the answer begins
    stop: int  # where the conversation ends


def answers_to_rewrite(batch: Batch, fraction: float, chance: Chance) -> list[Answer]:
    """Return one answer of each of about `fraction` of the conversations, chosen at random."""
    found: list[list[Answer]] = []
    host = host_of(batch)
    document, mask = host.document.cpu(), host.loss_mask.cpu()
    for row in range(len(document)):
        for conversation in document[row].unique_consecutive().tolist():
            if conversation == PAD_DOCUMENT:
                continue
            places = (document[row] == conversation).nonzero().squeeze(1)
            first, stop = int(places[0]), int(places[-1]) + 1
            answer = mask[row, first:stop]
            starts = (answer[1:] & ~answer[:-1]).nonzero().squeeze(1) + 1
            if len(starts):
                begins = [first + start for start in starts.tolist()]
                found.append([Answer(row, conversation, first, at, stop) for at in begins])
    if not found:
        return []
    names, zeros = [answers[0].conversation for answers in found], [0] * len(found)
    wanted = chance.accept(torch.full((len(found),), fraction), names, zeros, CHANGE)
    chosen = []
    for answers, name, yes in zip(found, names, wanted.tolist(), strict=True):
        if yes:
            probs = torch.full((1, len(answers)), 1 / len(answers))
            chosen.append(answers[int(chance.choose(probs, [name], [0], TURN))])
    return chosen


@dataclass(frozen=True)
class OwnWords:
    """A text source in which the drafter samples a fraction of the answers at a temperature."""

    fraction: float
    temperature: float

    def rewrite(self, drafter: CausalDrafter, batch: Batch, chance: TrainingChance) -> Batch:
        """Return the batch with some answers replaced by the drafter's samples."""
        return in_own_words(drafter, batch, self.fraction, self.temperature, chance.decoding())


@torch.no_grad()
def in_own_words(
    drafter: CausalDrafter, batch: Batch, fraction: float, temperature: float, chance: Chance
) -> Batch:
    """Return the batch with some answers, and what followed them, sampled from the drafter.

    An answer ends with the target's end of text, or where the conversation ended; space that is
    left over becomes padding. All sampled tokens are trained.
    """
    answers = answers_to_rewrite(batch, fraction, chance)
    if not answers:
        return batch
    training = drafter.training
    drafter.eval()
    try:
        written = continue_texts(drafter, batch, answers, temperature, chance)
    finally:
        drafter.train(training)
    new = Batch(*(tensor.cpu().clone() for tensor in vars(host_of(batch)).values()))
    for answer, tokens in zip(answers, written, strict=True):
        row, stop = answer.row, answer.start + len(tokens)
        new.tokens[row, answer.start : stop] = torch.tensor(tokens)
        new.loss_mask[row, answer.start : stop] = True
        new.tokens[row, stop : answer.stop] = 0
        new.loss_mask[row, stop : answer.stop] = False
        new.positions[row, stop : answer.stop] = 0
        new.document[row, stop : answer.stop] = PAD_DOCUMENT
    return placed(new, batch.tokens.device)


def continue_texts(
    drafter: CausalDrafter, batch: Batch, answers: list[Answer], temperature: float, chance: Chance
) -> list[list[int]]:
    """Return sampled answers; rows are sampled together, and each leaves when it has ended."""
    ends, device = frozenset(drafter.spec.eos_token_ids), batch.tokens.device
    written: list[list[int]] = [[] for _ in answers]
    active = list(range(len(answers)))
    cache = RaggedCache()
    before = [host_of(batch).tokens[a.row, a.first : a.start].tolist() for a in answers]
    logits = drafter.read(cache, *padded_rows(before, device))[:, 0]
    while True:
        probs = probabilities(logits, Sampling(temperature, 0, 1.0))
        names = [answers[i].conversation for i in active]
        starts = [answers[i].start - answers[i].first + len(written[i]) for i in active]
        tokens = chance.choose(probs, names, starts, EMIT)
        kept = []
        for place, (i, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
            written[i].append(token)
            room = answers[i].stop - answers[i].start
            if token not in ends and len(written[i]) < room:
                kept.append(place)
        if not kept:
            return written
        if len(kept) < len(active):
            cache.select(kept)
            active, tokens = [active[place] for place in kept], tokens[kept]
        logits = drafter.read(cache, tokens[:, None], [1] * len(active))[:, 0]
