"""Speculative decoding: propose, verify in one target pass, commit, roll back; until done."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from drafttrain.core.chance import Chance
from drafttrain.core.ops.ragged_cache import RaggedCache, padded_rows
from drafttrain.core.sampling import most_likely, probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import Counters, Decoded, Members, Proposal, TargetFeatures, Verdict
from drafttrain.decode.adaptive import Adaptive, Pace
from drafttrain.decode.autoregressive import emit
from drafttrain.decode.clock import Clock
from drafttrain.decode.draft import draft, nothing
from drafttrain.decode.policy import Policy, policy_of
from drafttrain.decode.rows import Passes, Row, Rows, Stops, check_room, to_the_end
from drafttrain.decode.verify import (
    LOSSLESS,
    Block,
    Rule,
    verify_block,
    verify_choices,
    verify_draws,
    verify_greedy,
)
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.shared.backlog import Backlog
from drafttrain.target.model import Target


@dataclass(frozen=True)
class Cycle:
    """One verification, recorded to audit the loop. Row j + 1 of `logits` follows node j."""

    rows: Sequence[int]
    starts: Sequence[int]
    proposal: Proposal
    logits: Float[Tensor, "batch positions vocab"]
    verdict: Verdict


def verify(
    rule: Rule,
    proposal: Proposal,
    logits: Float[Tensor, "batch positions vocab"],
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Verdict:
    """Return the verdict of the rule on every node, given the target's logits."""
    if sampling.greedy and rule.lossless:
        return verify_greedy(proposal, most_likely(logits))
    probs = probabilities(logits, sampling)
    if isinstance(rule, Block):
        return verify_block(proposal, probs, chance, rows, starts)
    if proposal.draft_probs is None and rule == LOSSLESS:
        return verify_choices(proposal, probs, chance, rows, starts)
    return verify_draws(rule, proposal, probs, chance, rows, starts)


def is_lossless(rule: Rule, sampling: Sampling) -> bool:
    """Whether the output has the target's distribution; at temperature 0 every rule is greedy."""
    return rule.lossless or sampling.greedy


def describe_rule(sampling: Sampling, rule: Rule = LOSSLESS, shape: str = "chain") -> str:
    """Return the name of the acceptance rule for reports; shape: of the proposals."""
    if sampling.greedy:
        return "greedy match (lossless)"
    if rule.lossless:
        return f"{shape} {rule.name} (lossless)"
    settings = ", ".join(f"{key} {value:g}" for key, value in vars(rule).items())
    return f"{shape} {rule.name} ({settings}; NOT lossless)"


def speculative_decode(
    target: Target, drafter: Drafter, prompt: Sequence[int], *, row: int = 0, **settings: object
) -> Decoded:
    """Decode one prompt with a drafter: `speculative_decode_batch` of a single row."""
    decode: Callable[..., list[Decoded]] = speculative_decode_batch
    return decode(target, drafter, [prompt], rows=[row], **settings)[0]


def speculative_passes(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy | int,
    sampling: Sampling,
    max_new_tokens: int,
    chance: Chance,
    rows: Sequence[int],
    stop_tokens: Collection[int] | None = None,
    stop_strings: Sequence[str] = (),
    draft_sampling: Sampling | None = None,
    rule: Rule = LOSSLESS,
    record: Callable[[Cycle], None] | None = None,
) -> Passes:
    """Decode prompts with a drafter, together; a lossless rule keeps the plain loop's distribution.

    policy: how proposals grow; a number is the depth of a chain. draft_sampling: how the drafter's
    logits become the distribution that drafts are drawn from (None: as the target's). Each output
    ends where the plain loop's would, also inside an accepted run; counters are kept both trimmed
    there and untrimmed. A cycle without a proposal for a row is a plain step for it, not a draft.
    Under an adaptive policy the drafts of a row depend on the rows decoded with it; its greedy
    output and the distribution of its sampled one do not.
    record: is called with every verification.
    """
    draft_sampling = draft_sampling or sampling
    policy = policy_of(policy)
    policy.check(drafter, draft_sampling)
    if policy.branches and isinstance(rule, Block):
        raise ValueError(
            f"rule must not be block for a {policy.describe()}: it is defined for chains; "
            "choose lossless"
        )
    capacity = check_room(target, prompts, max_new_tokens, drafter, policy.depth)
    stops = Stops(target, max_new_tokens, stop_tokens, stop_strings)
    batch, clock = Rows(prompts, rows), Clock(target.device)
    started = clock.now()
    cache = target.begin()
    tokens, counts = padded_rows(prompts, target.device)
    logits, features = target.step(cache, tokens, drafter.captures, counts, last_only=True)
    last_token = emit(logits[:, -1], sampling, chance, batch.names, batch.starts)
    state = drafter.begin(target.readout, tokens[:, 0], capacity)
    following = torch.cat([tokens[:, 1:], last_token[:, None]], dim=1)
    last_places = send_numbers(counts, following.device)[:, None] - 1
    following.scatter_(1, last_places, last_token[:, None])
    backlog = Backlog(drafter, state)
    backlog.add(following, counts, features)
    pace = Pace(policy, rows) if isinstance(policy, Adaptive) else None
    if pace is None:
        backlog.read()
    active = batch.active
    _, kept = batch.commit([[token] for token in last_token.tolist()], stops)
    prefilled = clock.now()
    yield active
    resumed = clock.now()
    if kept and len(kept) < len(active):
        target.select(cache, kept)
        backlog.select(kept)
        last_token = last_token[send_numbers(kept, last_token.device)]
    before = clock.now()
    clock.charge(active, prefill_s=[(started, prefilled), (resumed, before)])
    while batch.active:
        active, names, starts = batch.active, batch.names, batch.starts
        lengths = cache.lengths
        left = [max_new_tokens - len(row.output) for row in active]
        if pace is None or pace.begins(names, starts, left):
            backlog.read()
            proposal = draft(policy, drafter, state, draft_sampling, chance, names, starts, pace)
        else:
            proposal = nothing(len(active), target.device)
        t_verify = clock.now()
        drafted = torch.cat([last_token[:, None], proposal.tokens], dim=1)
        logits, features = target.step(cache, drafted, drafter.captures, branches=proposal.branches)
        verdict = verify(rule, proposal, logits, sampling, chance, names, starts)
        committed, accepted, new = committed_by(proposal, verdict)
        t_commit = clock.now()
        if record is not None:
            record(Cycle(names, starts, proposal, logits, verdict))
        if pace is not None and proposal.tokens.shape[1]:
            pace.learn(names, accepted, proposal.num_nodes.tolist())
        counts = [number + 1 for number in accepted]
        if verdict.path is not None:
            path = verdict.path[:, : max(accepted)]
            features = keep_path(target, cache, lengths, features, path)
        target.rollback(cache, [n + count for n, count in zip(lengths, counts, strict=True)])
        last_token, longest = verdict.bonus, max(counts)
        num_kept, kept = batch.commit(new, stops)
        for place, (row, nodes) in enumerate(zip(active, proposal.num_nodes.tolist(), strict=True)):
            _count(row, proposal, place, nodes, accepted[place], num_kept[place])
        if proposal.members is not None and proposal.tokens.shape[1]:
            _count_members(active, proposal.members, new, num_kept)
        t_observe = clock.now()
        if kept:
            features, committed = features.slice(0, longest), committed[:, :longest]
            if len(kept) < len(active):
                target.select(cache, kept)
                backlog.select(kept)
                places = send_numbers(kept, committed.device)
                features, committed = features.rows(kept), committed[places]
                last_token = last_token[places]
                counts = [counts[place] for place in kept]
            backlog.add(committed, counts, features)
            if proposal.tokens.shape[1]:
                backlog.read()
        after = clock.now()
        clock.charge(
            active,
            (proposal.depth, proposal.tokens.shape[1]),
            draft_s=[(before, t_verify), (t_observe, after)],
            verify_s=[(t_verify, t_commit)],
            other_s=[(t_commit, t_observe)],
        )
        yield active
        before = clock.now()
    clock.settle()
    return batch.decoded()


speculative_decode_batch = to_the_end(speculative_passes)


def committed_by(
    proposal: Proposal, verdict: Verdict
) -> tuple[Int[Tensor, "batch new"], list[int], list[list[int]]]:
    """Return what a verdict commits, the numbers of accepted tokens, and each row's new tokens.

    Each row of the first is its accepted tokens and the bonus, then padding. All that the host must
    know of a cycle comes in one transfer, its only wait.
    """
    tokens, path, bonus = proposal.tokens, verdict.path, verdict.bonus[:, None]
    tokens = tokens if path is None else tokens.gather(1, path)
    last_place = verdict.num_accepted[:, None]
    committed = torch.cat([tokens, bonus], dim=1).scatter_(1, last_place, bonus)
    told = torch.cat([last_place, committed], dim=1).tolist()
    return committed, [number for number, *_ in told], [row[1 : row[0] + 2] for row in told]


def keep_path(
    target: Target,
    cache: RaggedCache,
    lengths: Sequence[int],
    features: TargetFeatures,
    path: Int[Tensor, "batch depth"],
) -> TargetFeatures:
    """Move the accepted nodes of a tree together in the cache; return the features along the path.

    lengths: of the rows before the verification, whose first token is the last one committed.
    """
    target.keep(cache, [length + 1 for length in lengths], path)
    return features.take(functional.pad(path + 1, (1, 0)))


def _count(
    row: Row, proposal: Proposal, place: int, num_nodes: int, num_accepted: int, num_kept: int
) -> None:
    """Count one draft of a row, which is at `place` in the batch."""
    stats = row.stats
    stats.num_target_passes += 1
    row.depth = depth = min(proposal.depth, num_nodes)
    if num_nodes == 0:
        stats.cycles.append((len(row.output) - num_kept, 0, 0))
        return
    stats.untrimmed.add(num_nodes, num_accepted, depth)
    drafted, accepted = num_nodes, num_accepted
    if cut := num_kept <= num_accepted:  # the bonus did not reach the output
        depth = accepted = drafted = num_kept
        if proposal.tree is not None:
            depths = proposal.tree.depth
            own = depths[min(place, len(depths) - 1), :num_nodes]
            drafted = int((own <= num_kept).sum())
    stats.trimmed.add(drafted, accepted, depth, cut)
    stats.cycles.append((len(row.output) - num_kept, drafted, accepted))


def _count_members(
    rows: Sequence[Row], members: Members, new: Sequence[Sequence[int]], num_kept: Sequence[int]
) -> None:
    """Count the drafts of a cycle for each member of an ensemble that has a token in them."""
    drafters = " + ".join(sorted({name for row in members for name in row.values()}))
    for row, nodes, (*accepted, _), kept in zip(rows, members, new, num_kept, strict=True):
        row.stats.drafters.append(drafters)
        if kept <= len(accepted):  # what the output cuts off is not counted
            nodes = {node: name for node, name in nodes.items() if len(node) <= kept}
        path = [nodes[tuple(accepted[:end])] for end in range(1, min(len(accepted), kept) + 1)]
        for name in dict.fromkeys(nodes.values()):
            counters = row.stats.by_member.setdefault(name, Counters())
            counters.add([*nodes.values()].count(name), path.count(name))
