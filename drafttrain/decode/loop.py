"""Speculative decoding: propose, verify in one target pass, commit, roll back; until done."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from drafttrain.chance import Chance
from drafttrain.decode.autoregressive import check_room, clock_of, emit
from drafttrain.decode.draft import draft_chain
from drafttrain.decode.verify import verify_greedy, verify_rejection
from drafttrain.drafters.base import Drafter
from drafttrain.sampling import probabilities
from drafttrain.target.target import Target
from drafttrain.types import Decoded, DecodeStats, Proposal, Sampling, Verdict


def verify(
    proposal: Proposal,
    logits: Tensor,
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Apply the lossless rule that the sampling asks for to logits "batch node+1 vocab"."""
    if sampling.greedy:
        return verify_greedy(proposal, logits.argmax(-1))
    return verify_rejection(proposal, probabilities(logits, sampling), chance, rows, starts)


def rule_of(sampling: Sampling) -> str:
    """Name the acceptance rule for reports."""
    if sampling.greedy:
        return "greedy match (lossless)"
    return "chain rejection sampling (lossless)"


@torch.inference_mode()
def speculative_decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    depth: int,
    sampling: Sampling,
    max_new_tokens: int,
    chance: Chance,
    row: int = 0,
    stop_tokens: Collection[int] | None = None,
) -> Decoded:
    """Decode one prompt with a drafter; the law of the output is the plain loop's.

    depth: drafted tokens per cycle. The output ends with the first stop token or at the limit,
    also inside an accepted run; counters are kept trimmed there and untrimmed. A cycle in which
    the drafter offers nothing is a plain step and no draft.
    """
    check_depth(drafter, depth)
    capacity = check_room(target, prompt, max_new_tokens, depth)
    stops = frozenset(target.spec.eos_token_ids if stop_tokens is None else stop_tokens)
    stats, now, rows = DecodeStats(), clock_of(target), [row]
    started = now()
    cache = target.begin()
    tokens = torch.tensor([list(prompt)], device=target.device)
    logits, features = target.step(cache, tokens, drafter.captures, last_only=True)
    root = emit(logits[:, -1], sampling, chance, rows, [len(prompt)])
    state = drafter.begin(target.readout, tokens[:, 0], capacity)
    drafter.observe(state, torch.cat([tokens[:, 1:], root[:, None]], dim=1), features, None)
    output = [int(root)]
    decoding = now()
    stats.prefill_s = decoding - started
    while len(output) < max_new_tokens and output[-1] not in stops:
        starts = [len(prompt) + len(output)]
        t_draft = now()
        proposal = draft_chain(drafter, state, depth, sampling, chance, rows, starts)
        t_verify = now()
        logits, features = target.step(
            cache, torch.cat([root[:, None], proposal.tokens], dim=1), drafter.captures
        )
        verdict = verify(proposal, logits, sampling, chance, rows, starts)
        num_nodes, num_accepted = proposal.tokens.shape[1], int(verdict.num_accepted)
        t_commit = now()
        target.rollback(cache, num_nodes - num_accepted)
        root = verdict.bonus
        committed = torch.cat([proposal.tokens[:, :num_accepted], root[:, None]], dim=1)
        new = committed[0].tolist()
        kept = _kept(new, stops, max_new_tokens - len(output))
        output.extend(new[:kept])
        _count(stats, num_nodes, num_accepted, kept)
        t_observe = now()
        if len(output) < max_new_tokens and output[-1] not in stops:
            drafter.observe(state, committed, features.slice(0, num_accepted + 1), verdict.path)
        stats.draft_s += (t_verify - t_draft) + (now() - t_observe)
        stats.verify_s += t_commit - t_verify
    stats.other_s = now() - decoding - stats.draft_s - stats.verify_s
    return Decoded(tuple(output), stats)


def check_depth(drafter: Drafter, depth: int) -> None:
    """Refuse a depth that the drafter cannot draft."""
    deepest = drafter.capabilities.max_depth
    if depth < 1 or (deepest is not None and depth > deepest):
        limit = "at least 1" if deepest is None else f"in 1..{deepest}"
        raise ValueError(f"depth must be {limit} for drafter={drafter.config.name}, got {depth}")


def _kept(new: list[int], stops: frozenset[int], room: int) -> int:
    """Return how many of the new tokens reach the output."""
    for index, token in enumerate(new[:room]):
        if token in stops:
            return index + 1
    return min(len(new), room)


def _count(stats: DecodeStats, num_nodes: int, num_accepted: int, kept: int) -> None:
    stats.num_target_passes += 1
    if num_nodes == 0:
        return
    stats.untrimmed.add(num_nodes, num_accepted)
    if kept > num_accepted:  # the bonus reached the output: nothing was cut
        stats.trimmed.add(num_nodes, num_accepted)
    else:
        stats.trimmed.add(kept, kept)
