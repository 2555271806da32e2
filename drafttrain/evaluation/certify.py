"""The certificate: checks of losslessness on the user's own target."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Decoded, Proposal, Verdict
from drafttrain.decode.adaptive import Adaptive
from drafttrain.decode.loop import Cycle, is_lossless
from drafttrain.decode.policy import Policy
from drafttrain.decode.rows import at_once
from drafttrain.decode.verify import Rule, one_step_distribution, without
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.measure import ALONE, Decode, DraftMethod, decoders
from drafttrain.report.bootstrap import Resampling, interval
from drafttrain.report.phrases import bounds
from drafttrain.report.results import EXACT_DTYPES, Check, Divergence
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.terminal import Ticker, progress, silent
from drafttrain.target.model import Target

COMPARED_IDS = 256
SAME_LOGITS = 1e-3  # of the largest logit; float32 leaves 1e-6, a wrong position 1e-1
ROUNDED_LOGITS = 0.02  # the same in shorter formats; bfloat16 leaves 3e-3 in the tiny target
EXACT = 1e-4  # total variation; float32 sums over large vocabularies leave 1e-6
SMALLEST_P = 1e-3  # a correct loop fails the test of uniformity once in a thousand certificates
SAMPLED_AT = 1.0  # the temperature of the sampled checks if the evaluation itself is greedy
PASS_WIDTHS = (1, 2, 3, 5, 8)
ROUNDING_MARGIN = 2.0  # a choice flips when the two best logits both move by the rounding noise

Prompts = Sequence[tuple[str, list[int]]]  # id, tokens


class Audit:
    """The output distribution of one sampled decoding, from its recorded cycles."""

    def __init__(self, rule: Rule, sampling: Sampling, vocab_size: int) -> None:
        self.rule, self.sampling = rule, sampling
        self.distances: list[float] = []  # total variation, one per distribution visited
        self.trees = False  # whether proposals were trees
        # Logits of some ids only, at every position of every row: all would fill the memory.
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randperm(vocab_size, generator=generator)[:COMPARED_IDS]
        self.logits: dict[int, dict[int, Tensor]] = {}

    def __call__(self, cycle: Cycle) -> None:
        """Record how far the one-step distribution is from the target's, at each position."""
        probs = probabilities(cycle.logits, self.sampling)
        self.trees |= cycle.proposal.tree is not None
        ids = self.ids.to(cycle.logits.device)
        for row, path in enumerate(accepted_paths(cycle.verdict)):
            seen = self.logits.setdefault(cycle.rows[row], {})
            for step, place in enumerate([0, *(node + 1 for node in path)]):
                seen[cycle.starts[row] + step] = cycle.logits[row, place, ids].double().cpu()
            if not self.rule.per_token:
                continue
            for left, drawn_from in tested(
                self.rule, cycle.proposal, probs[row].double(), row, path
            ):
                emitted = one_step_distribution(self.rule, left, drawn_from)
                self.distances.append(float((emitted - left).abs().sum() / 2))


def accepted_paths(verdict: Verdict) -> list[list[int]]:
    """Return the accepted nodes of each row."""
    counts = verdict.num_accepted.tolist()
    if verdict.path is None:
        return [list(range(count)) for count in counts]
    return [row[:count] for row, count in zip(verdict.path.tolist(), counts, strict=True)]


def tested(
    rule: Rule,
    proposal: Proposal,
    target_probs: Float[Tensor, "position vocab"],
    row: int,
    path: Sequence[int],
) -> Iterator[tuple[Float[Tensor, "1 vocab"], Float[Tensor, "1 vocab"]]]:
    """Yield each test of a row: what was left of the target's distribution, and the draft's.

    The children of a node on the path are tested one after another, up to the accepted one.
    """
    num_nodes = int(proposal.num_nodes[row])
    parents = list(range(-1, num_nodes - 1))
    if proposal.tree is not None:
        own = min(row, len(proposal.tree.parents) - 1)
        parents = proposal.tree.parents[own].tolist()[:num_nodes]
    for place, accepted in zip([-1, *path], [*path, None], strict=True):
        left, drawn_from = target_probs[place + 1 : place + 2], None
        if proposal.draft_probs is not None and place in parents:
            source = place + 1 if proposal.sources is None else int(proposal.sources[place + 1])
            drawn_from = proposal.draft_probs[row, source : source + 1].to(left.dtype)
        for node in [node for node, parent in enumerate(parents) if parent == place]:
            token = proposal.tokens[row, node : node + 1]
            if proposal.draft_probs is None:
                drawn_from = torch.zeros_like(left).scatter_(1, token[:, None], 1.0)
            assert drawn_from is not None
            yield left, drawn_from
            if node == accepted:
                break
            left = rule.correction(left, drawn_from)
            if not proposal.replacement:
                drawn_from = without(drawn_from, token)


def certify(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    config: EvalConfig,
    *,
    timed: tuple[Target, Drafter] | None,
    seed: int,
    policies: Mapping[str, Policy] | None = None,
) -> list[Check]:
    """Return the checks of the certificate, made on these prompts.

    In dtypes shorter than float32 bounds are wider, and batches are not judged.
    policies: of prompts that have one of their own, by their ids. timed: the same two in the dtype
    of the timing, if that is another; its divergences are audited.
    """
    sampling = config.sampling
    if sampling.greedy:
        sampling = Sampling(SAMPLED_AT, config.top_k, config.top_p)
    checks = []
    pairs = [(target, drafter), *([timed] if timed is not None else [])]
    with progress("certificate", (2 * len(pairs) + 2) * len(prompts)) as tick:
        for pair in pairs:
            checks.append(greedy_check(*pair, prompts, config, policies, tick))
        audit = Audit(config.acceptance_rule, sampling, target.spec.vocab_size)
        method = DraftMethod("drafted", config.depth, drafter, config.policy_at(config.depth))
        speculate = decoders(target, [method], config, sampling, seed)[method.key]
        drafted = _decoded(partial(speculate, record=audit), prompts, policies, tick=tick)
        checks.append(distribution_check(audit))
        checks.append(cache_check(target, prompts, drafted, audit))
        plainly = decoders(target, [], config, sampling, seed + 1)[ALONE]
        plain = _decoded(plainly, prompts, tick=tick)
        resampling = Resampling(config.resamples, seed)
        checks += text_checks(target, prompts, drafted, plain, audit, resampling)
        if config.batch_size > 1:
            batch = [tokens for _, tokens in prompts[: config.batch_size]]
            rows = at_once(speculate(batch, rows=range(len(batch))))
            alone = not isinstance(method.policy, Adaptive) and not policies
            alone = alone and dtype_name(target.dtype) in EXACT_DTYPES
            checks.append(batch_check(rows, drafted[: len(batch)], alone))
    return checks


def greedy_check(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    config: EvalConfig,
    policies: Mapping[str, Policy] | None = None,
    tick: Ticker = silent,
) -> Check:
    """Compare greedy speculative output with the plain loop's; audit where they first differ.

    policies: of prompts that have one of their own, by their ids. tick: is told of each output.
    In float32 they must be equal. In other dtypes a difference passes if the target's two best
    logits are closer than its own rounding noise: the logits of a position differ by that much
    between a pass over several tokens and a pass over one.
    """
    divergences: list[Divergence] = []
    method = DraftMethod("drafted", config.depth, drafter, config.policy_at(config.depth))
    decode = decoders(target, [method], config, GREEDY, seed=0)
    for name, tokens in prompts:
        (plain,) = _decoded(decode[ALONE], [(name, tokens)])
        (drafted,) = _decoded(decode[method.key], [(name, tokens)], policies)
        if plain.tokens != drafted.tokens:
            place = first_difference(plain.tokens, drafted.tokens)
            gap, noise = near_tie(target, [*tokens, *plain.tokens[:place]])
            tie = gap <= ROUNDING_MARGIN * noise
            divergences.append(Divergence(name, place, gap, noise, tie))
        tick(2)
    dtype = dtype_name(target.dtype)
    same = len(prompts) - len(divergences)
    ties = sum(divergence.tie for divergence in divergences)
    exact = dtype in EXACT_DTYPES
    told = f"{same} of {len(prompts)} greedy outputs identical to plain decoding in {dtype}"
    if divergences:
        told += (
            f"; at the first difference the target's two best logits were closer than its rounding "
            f"noise in {ties} of {len(divergences)}"
        )
    passed = not divergences or (not exact and ties == len(divergences))
    bound = "all identical" if exact else f"gap <= {ROUNDING_MARGIN:g} x rounding noise"
    return Check(f"greedy output, {dtype}", passed, same / len(prompts), bound, told, divergences)


@torch.inference_mode()
def near_tie(target: Target, text: Sequence[int]) -> tuple[float, float]:
    """Return the gap of the target's two best logits after a text, and its rounding noise there.

    The noise is the largest difference, over the vocabulary, between the logits of one pass over
    the whole text and those of passes that read the last few tokens at once, as the loops do; and
    no less than the spacing of the dtype at the best logit.
    """
    tokens = torch.tensor([list(text)], device=target.device)
    whole, _ = target.step(target.begin(), tokens, last_only=True)
    logits = whole[0, -1].float()
    noise = float(logits.max().abs()) * torch.finfo(target.dtype).eps
    for width in (width for width in PASS_WIDTHS if width < len(text)):
        cache = target.begin()
        target.step(cache, tokens[:, :-width], last_only=True)
        stepped, _ = target.step(cache, tokens[:, -width:], last_only=True)
        noise = max(noise, float((logits - stepped[0, -1].float()).abs().max()))
    best = logits.topk(2).values
    return float(best[0] - best[1]), noise


def distribution_check(audit: Audit) -> Check:
    """Compare the distribution of each emitted token, in closed form, with the target's there."""
    distances = np.array(audit.distances) if audit.distances else np.zeros(1)
    mean, worst = float(distances.mean()), float(distances.max())
    lossless = is_lossless(audit.rule, audit.sampling)
    text = (
        "one-step distribution in closed form from the recorded probabilities, "
        f"{len(audit.distances):,} positions at temperature {audit.sampling.temperature:g}: total "
        f"variation from the target's distribution {mean:.2g} on average, {worst:.2g} at most"
    )
    bound = f"at most {EXACT:g}" if lossless else "none: the rule is not lossless"
    if audit.trees:
        text = text.replace("positions", "tests of a node", 1)
        text = text.replace("the target's distribution", "what was left of the target's", 1)
    if not audit.rule.per_token:
        bound = "not computed"
        text = f"not computed: {audit.rule.name} decides on whole chains, not token by token"
    # Without drafts, nothing is proved.
    passed = worst <= EXACT if lossless and audit.distances else None
    return Check("one-step distribution", passed, worst if lossless else mean, bound, text, [])


@torch.inference_mode()
def cache_check(
    target: Target, prompts: Prompts, drafted: Sequence[Decoded], audit: Audit
) -> Check:
    """Compare the logits of the loop's verification, with its cache, to a pass without a cache."""
    distances: list[float] = []
    scale = 0.0
    for row, ((_, prompt), decoded) in enumerate(zip(prompts, drafted, strict=True)):
        text = [*prompt, *decoded.tokens]
        tokens = torch.tensor([text], device=target.device)
        whole, _ = target.step(target.begin(), tokens)
        expected = whole[0][:, audit.ids.to(whole.device)].double().cpu()
        for position, logits in audit.logits.get(row, {}).items():
            if position <= len(text):
                distances.append(float((logits - expected[position - 1]).abs().max()))
        scale = max(scale, float(whole.float().abs().max()))
    worst = float(np.max(distances)) if distances else 0.0  # numpy's: a NaN stays one
    relative = worst / max(scale, 1e-9)
    told = (
        f"logits of {len(distances):,} verified positions against one pass without a cache: "
        f"{relative:.2g} of the largest logit at most"
    )
    most = SAME_LOGITS if dtype_name(target.dtype) in EXACT_DTYPES else ROUNDED_LOGITS
    bound = f"at most {most:g}"
    passed = relative <= most if distances else None
    return Check("cache and positions", passed, relative, bound, told, [])


@torch.inference_mode()
def text_checks(
    target: Target,
    prompts: Prompts,
    drafted: Sequence[Decoded],
    plain: Sequence[Decoded],
    audit: Audit,
    resampling: Resampling,
) -> list[Check]:
    """Compare sampled text with the target's own distribution, and with text sampled plainly.

    If the target's distribution function is F, u = F(x-) + v p(x) with v uniform is uniform for
    tokens x drawn from it (Rosenblatt, 1952, randomised): this tests the whole loop.
    """
    lossless = is_lossless(audit.rule, audit.sampling)
    generator = np.random.default_rng(0)
    uniforms: list[float] = []
    likelihood: list[list[float]] = [[], []]
    outside = 0
    for place, outputs in enumerate((drafted, plain)):
        for (_, prompt), decoded in zip(prompts, outputs, strict=True):
            text = torch.tensor([[*prompt, *decoded.tokens]], device=target.device)
            logits, _ = target.step(target.begin(), text[:, :-1])  # one pass without a cache
            probs = probabilities(logits[0, len(prompt) - 1 :], audit.sampling).double()
            tokens = text[0, len(prompt) :, None].to(probs.device)
            chosen = probs.gather(1, tokens)[:, 0]
            likelihood[place].append(float(chosen.clamp(min=1e-30).log().mean()))
            if place == 0:
                before = probs.cumsum(-1).gather(1, tokens)[:, 0] - chosen
                drawn = generator.random(len(tokens))
                uniforms += (before.cpu().numpy() + drawn * chosen.cpu().numpy()).tolist()
                outside += int((chosen == 0).sum())
    test = stats.kstest(np.clip(uniforms, 0, 1), "uniform")
    told = (
        f"{len(uniforms):,} sampled tokens follow the target's distribution: Kolmogorov-Smirnov "
        f"p = {test.pvalue:.2g}"
    )
    if outside:
        told += f"; {outside} tokens lie outside the target's nucleus, by rounding or by the rule"
    passed = bool(test.pvalue >= SMALLEST_P) if lossless else None
    bound = f"p >= {SMALLEST_P:g}" if lossless else "none: the rule is not lossless"
    uniform = Check("distribution of the sampled text", passed, float(test.pvalue), bound, told, [])
    ours, theirs = (float(np.mean(values)) for values in likelihood)
    ci95 = interval(np.subtract, likelihood, resampling)
    told = (
        f"mean log-probability of a sampled token under the target: {ours:.3f}, of plain decoding "
        f"{theirs:.3f}; difference {ours - theirs:+.3f} ({bounds(ci95, 3)})"
    )
    # By chance alone, one interval in twenty excludes zero: this check is reported, not judged.
    quality = Check("quality", None, ours - theirs, "reported", told, [])
    return [uniform, quality]


def batch_check(
    together: Sequence[Decoded], alone: Sequence[Decoded], comparable: bool = True
) -> Check:
    """Compare sampled rows of a batch with the same rows decoded alone: chance is keyed by row.

    comparable: whether they were drafted alike. Under an adaptive policy a row's depth, and so
    which choices it takes, depends on the rows beside it; below float32 its rounding does.
    """
    same = sum(a.tokens == b.tokens for a, b in zip(together, alone, strict=True))
    text = f"{same} of {len(alone)} sampled rows of a batch are those of batch 1"
    if not comparable:
        text += "; they were not drafted alike, and need not be"
    passed = same == len(alone) if comparable and len(alone) > 1 else None  # one is not a batch
    return Check("batch", passed, same / len(alone), "all identical", text, [])


def _decoded(
    decode: Decode,
    prompts: Prompts,
    policies: Mapping[str, Policy] | None = None,
    tick: Ticker = silent,
) -> list[Decoded]:
    found: list[Decoded] = []
    for row, (name, tokens) in enumerate(prompts):
        own = {"policy": policies[name]} if policies and name in policies else {}
        found += at_once(decode([tokens], rows=[row], **own))
        tick(1)
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first position where two outputs differ; the shorter's end if it is a prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
