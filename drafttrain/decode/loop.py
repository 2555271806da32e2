"""Speculative decoding: propose, verify in one target pass, commit, roll back; until done."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from drafttrain.core.chance import Chance
from drafttrain.core.ops.ragged_cache import padded_rows
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Decoded, Proposal, Verdict
from drafttrain.decode.autoregressive import clock_of, emit
from drafttrain.decode.draft import draft_chain
from drafttrain.decode.rows import Row, Rows, Stops, charge, check_room
from drafttrain.decode.verify import LOSSLESS, Rule, verify_chain, verify_greedy
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target


@dataclass(frozen=True)
class Cycle:
    """One verification, for those who audit the loop. Law j of `logits` follows node j - 1."""

    rows: Sequence[int]
    starts: Sequence[int]
    proposal: Proposal
    logits: Float[Tensor, "batch laws vocab"]
    verdict: Verdict


def verify(
    rule: Rule,
    proposal: Proposal,
    logits: Float[Tensor, "batch laws vocab"],
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Apply the rule to what the target says of every node."""
    if sampling.greedy and rule.lossless:
        return verify_greedy(proposal, logits.argmax(-1))
    return verify_chain(rule, proposal, probabilities(logits, sampling), chance, rows, starts)


def is_lossless(rule: Rule, sampling: Sampling) -> bool:
    """Whether the output's law is the target's: at temperature 0 every rule matches greedily."""
    return rule.lossless or sampling.greedy


def rule_of(sampling: Sampling, rule: Rule = LOSSLESS) -> str:
    """Name the acceptance rule for reports."""
    if sampling.greedy:
        return "greedy match (lossless)"
    if rule.lossless:
        return f"chain {rule.name} (lossless)"
    settings = ", ".join(f"{key} {value:g}" for key, value in vars(rule).items())
    return f"chain {rule.name} ({settings}; NOT lossless)"


def speculative_decode(
    target: Target, drafter: Drafter, prompt: Sequence[int], *, row: int = 0, **settings: object
) -> Decoded:
    """Decode one prompt with a drafter: `speculative_decode_batch` of a single row."""
    decode: Callable[..., list[Decoded]] = speculative_decode_batch
    return decode(target, drafter, [prompt], rows=[row], **settings)[0]


@torch.inference_mode()
def speculative_decode_batch(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    sampling: Sampling,
    max_new_tokens: int,
    chance: Chance,
    rows: Sequence[int],
    stop_tokens: Collection[int] | None = None,
    stop_strings: Sequence[str] = (),
    draft_sampling: Sampling | None = None,
    rule: Rule = LOSSLESS,
    record: Callable[[Cycle], None] | None = None,
) -> list[Decoded]:
    """Decode prompts with a drafter, together; under a lossless rule the law is the plain loop's.

    depth: drafted tokens per cycle. draft_sampling: how the drafter's logits become the law that
    drafts are drawn from (None: as the target's). Each output ends where the plain loop's would,
    also inside an accepted run; counters are kept trimmed there and untrimmed. A cycle in which a
    row is offered nothing is a plain step for it and no draft. record: told of every verification.
    """
    check_depth(drafter, depth)
    capacity = check_room(target, prompts, max_new_tokens, depth)
    stops = Stops(target, max_new_tokens, stop_tokens, stop_strings)
    batch, now = Rows(prompts, rows), clock_of(target)
    draft_sampling = draft_sampling or sampling
    started = now()
    cache = target.begin()
    tokens, counts = padded_rows(prompts, target.device)
    logits, features = target.step(cache, tokens, drafter.captures, counts, last_only=True)
    root = emit(logits[:, -1], sampling, chance, batch.names, batch.starts)
    state = drafter.begin(target.readout, tokens[:, 0], capacity)
    following = torch.cat([tokens[:, 1:], root[:, None]], dim=1)
    following.scatter_(1, torch.tensor(counts, device=root.device)[:, None] - 1, root[:, None])
    drafter.observe(state, following, counts, features)
    going = batch.going
    _, staying = batch.commit([[token] for token in root.tolist()], stops)
    if staying and len(staying) < len(going):
        target.select(cache, staying)
        drafter.select(state, staying)
        root = root[staying]
    before = now()
    charge(going, prefill_s=before - started)
    while batch.going:
        going, names, starts = batch.going, batch.names, batch.starts
        lengths = cache.lengths
        proposal = draft_chain(drafter, state, depth, draft_sampling, chance, names, starts)
        t_verify = now()
        drafted = torch.cat([root[:, None], proposal.tokens], dim=1)
        logits, features = target.step(cache, drafted, drafter.captures)
        verdict = verify(rule, proposal, logits, sampling, chance, names, starts)
        accepted = verdict.num_accepted.tolist()
        t_commit = now()
        if record is not None:
            record(Cycle(names, starts, proposal, logits, verdict))
        counts = [number + 1 for number in accepted]
        target.rollback(cache, [n + count for n, count in zip(lengths, counts, strict=True)])
        root, longest = verdict.bonus, max(counts)
        committed = torch.cat([proposal.tokens, root[:, None]], dim=1)[:, :longest]
        committed.scatter_(1, verdict.num_accepted[:, None], root[:, None])
        new = [row[:count] for row, count in zip(committed.tolist(), counts, strict=True)]
        kept, staying = batch.commit(new, stops)
        for row, nodes, taken, count in zip(
            going, proposal.num_nodes.tolist(), accepted, kept, strict=True
        ):
            _count(row, nodes, taken, count)
        t_observe = now()
        if staying:
            features = features.slice(0, longest)
            if len(staying) < len(going):
                target.select(cache, staying)
                drafter.select(state, staying)
                features, committed = features.rows(staying), committed[staying]
                root = root[staying]
                counts = [counts[place] for place in staying]
            drafter.observe(state, committed, counts, features)
        after = now()
        draft_s = (t_verify - before) + (after - t_observe)
        verify_s = t_commit - t_verify
        other_s = after - before - draft_s - verify_s
        charge(going, draft_s=draft_s, verify_s=verify_s, other_s=other_s)
        before = after
    return batch.decoded()


def check_depth(drafter: Drafter, depth: int) -> None:
    """Refuse a depth that the drafter cannot draft."""
    deepest = drafter.max_depth
    if depth < 1 or (deepest is not None and depth > deepest):
        limit = "at least 1" if deepest is None else f"in 1..{deepest}"
        raise ValueError(f"depth must be {limit} for drafter={drafter.config.name}, got {depth}")


def _count(row: Row, num_nodes: int, num_accepted: int, kept: int) -> None:
    stats = row.stats
    stats.num_target_passes += 1
    if num_nodes == 0:
        stats.cycles.append((len(row.output) - kept, 0, 0))
        return
    stats.untrimmed.add(num_nodes, num_accepted)
    # Where the bonus reached the output nothing was cut.
    drafted, accepted = (num_nodes, num_accepted) if kept > num_accepted else (kept, kept)
    stats.trimmed.add(drafted, accepted)
    stats.cycles.append((len(row.output) - kept, drafted, accepted))
