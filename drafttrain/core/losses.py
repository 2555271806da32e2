"""The token losses, per position; callers sum them and divide by the step's denominator, once.

Logits are compared in float32 (or float64 if they are), whatever the compute dtype. Every term
depends on one position only, so positions may be computed in chunks. `target_probs` is the target's
distribution, a constant: no gradient reaches it. Zero probabilities contribute their limit
(0 log 0 = 0), also where a logit is -inf; an infinite divergence has a finite gradient. A NaN stays
a NaN, so that training detects it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from drafttrain.core.ops.layer_calls import wide_dtype
from drafttrain.runtime import limits
from drafttrain.runtime.settings import Settings, require
from drafttrain.runtime.untrusted_input import did_you_mean

NOT_A_LABEL = -1  # a hard label outside the drafter's vocabulary: its position contributes zero

Rows = Float[Tensor, "position vocab"]
PerPosition = Float[Tensor, " position"]
Labels = Int[Tensor, " position"]


def soft_cross_entropy(logits: Rows, target_probs: Rows) -> PerPosition:
    """Return -sum target_probs * log softmax(logits): forward KL plus the target's entropy."""
    return -_unless_zero(target_probs, target_probs * _log_probs(logits)).sum(-1)


def hard_cross_entropy(logits: Rows, tokens: Labels) -> PerPosition:
    """Return the negative log-likelihood of the given tokens, zero for NOT_A_LABEL."""
    return functional.cross_entropy(
        _wide(logits), tokens, reduction="none", ignore_index=NOT_A_LABEL
    )


def forward_kl(logits: Rows, target_probs: Rows) -> PerPosition:
    """Return KL(target || draft) = sum target_probs * log(target_probs / draft_probs), in nats.

    The distillation loss of Hinton et al., 2015 (arXiv:1503.02531); DistillSpec's FKL (Zhou et al.,
    2023, arXiv:2310.08461). Infinite where the target predicts a token that the drafter cannot.
    """
    gap = target_probs.log() - _log_probs(logits)
    return _unless_zero(target_probs, target_probs * gap).sum(-1)


def reverse_kl(logits: Rows, target_probs: Rows) -> PerPosition:
    """Return KL(draft || target) = sum draft_probs * log(draft_probs / target_probs), in nats.

    DistillSpec's RKL (Zhou et al., 2023, arXiv:2310.08461). A target probability below the smallest
    normal number counts as that number: a softmax underflows to zero where a probability is merely
    small, and the divergence would be infinite at most positions of a sharp target.
    """
    log_probs = _log_probs(logits)
    return (log_probs.exp() * (_finite(log_probs) - _log_floored(target_probs))).sum(-1)


def jsd(logits: Rows, target_probs: Rows, beta: float) -> PerPosition:
    """Return beta KL(target || mix) + (1 - beta) KL(draft || mix), in nats.

    mix = beta target + (1 - beta) draft: the generalised Jensen-Shannon divergence of GKD (Agarwal
    et al., 2023, arXiv:2306.13649, section 2). With beta 1/2 it is symmetric and at most log 2;
    divided by beta it tends to forward KL as beta -> 0, by 1 - beta to reverse KL as beta -> 1.
    """
    log_probs = _log_probs(logits)
    probs = log_probs.exp()
    log_mix = _log_floored(beta * target_probs + (1 - beta) * probs)
    of_target = torch.xlogy(target_probs, target_probs) - target_probs * log_mix
    of_draft = probs * (_finite(log_probs) - log_mix)
    return (beta * of_target + (1 - beta) * of_draft).sum(-1)


def total_variation(logits: Rows, target_probs: Rows) -> PerPosition:
    """Return sum |target_probs - draft_probs| / 2 = 1 - sum min(target_probs, draft_probs).

    One minus the probability that a drafted token is accepted (Leviathan et al., 2022,
    arXiv:2211.17192, section 3.3); DistillSpec's TVD.
    """
    return (target_probs - _wide(logits).softmax(-1)).abs().sum(-1) / 2


def rejection(logits: Rows, target_probs: Rows) -> PerPosition:
    """Return 1 - sum min(target_probs, draft_probs), the probability that a draft is rejected.

    It is total variation, but for a `target_probs` that may sum to less than 1: the rest belongs to
    tokens that the drafter cannot draft.
    """
    return 1 - torch.minimum(target_probs, _wide(logits).softmax(-1)).sum(-1)


def lk_hybrid(logits: Rows, target_probs: Rows, eta: float) -> PerPosition:
    """Return w KL(target || draft) + (1 - w) TV with w = exp(-eta * alpha), alpha = 1 - TV.

    The adaptive hybrid of LK losses (arXiv:2602.23881): KL where the distributions hardly overlap
    and TV's gradient vanishes, TV where they do overlap. As in vLLM's speculators (`lk_hybrid`),
    each position has its own w, from its own alpha, and no gradient flows through w. With eta = 0
    it is forward KL.
    """
    distance = total_variation(logits, target_probs)
    weight = torch.exp(-eta * (1 - distance.detach()))
    divergence = _unless_zero(weight, weight * forward_kl(logits, target_probs))
    return divergence + (1 - weight) * distance


def negative_log_acceptance(logits: Rows, target_probs: Rows) -> PerPosition:
    """Return -log sum min(target_probs, draft_probs), the negative log of the acceptance rate.

    LK losses' other form (arXiv:2602.23881), speculators' `nla`: its gradient is total variation's
    divided by the overlap, so that it does not vanish where the distributions hardly overlap. Of a
    target that is certain, it is cross-entropy. Computed from log-probabilities: an overlap that
    rounds to zero still has its logarithm. Infinite where no token is possible in both.
    """
    shared = torch.minimum(target_probs.log(), _log_probs(logits))
    # Without a common token the gradient would be NaN: it is zero.
    nothing = (shared == -torch.inf).all(-1)
    overlap = shared.masked_fill(nothing[..., None], 0).logsumexp(-1)
    return torch.where(nothing, torch.inf, -overlap)


def top_k(logits: Rows, target_probs: Rows, k: int) -> PerPosition:
    """Return -sum target_probs * log draft_probs over the target's k most likely tokens.

    The top-K distillation of HASS (Zhang et al., 2024, arXiv:2408.15766, section 3.1, K = 10):
    neither distribution is renormalised over these tokens. With k of the vocabulary's size it is
    soft cross-entropy.
    """
    likely = target_probs.topk(min(k, target_probs.shape[-1]), sorted=False)
    log_probs = _log_probs(logits).gather(-1, likely.indices)
    return -_unless_zero(likely.values, likely.values * log_probs).sum(-1)


def feature_regression(
    predicted: Float[Tensor, "position hidden"], features: Float[Tensor, "position hidden"]
) -> PerPosition:
    """Return the smooth-L1 distance, averaged over the hidden width (EAGLE, section 3.2)."""
    return functional.smooth_l1_loss(_wide(predicted), _wide(features), reduction="none").mean(-1)


def _wide(values: Tensor) -> Tensor:
    return values.to(wide_dtype(values))


def _log_probs(logits: Tensor) -> Tensor:
    return _wide(logits).log_softmax(-1)


def _unless_zero(weights: Tensor, product: Tensor) -> Tensor:
    """Return `product`, a product with `weights`, but zero where these are zero: 0 * inf is NaN."""
    return torch.where(weights == 0, 0, product)  # not weights > 0: a NaN must pass


def _finite(log_probs: Tensor) -> Tensor:
    """Return floored log-probabilities, to be weighted by probabilities, zero below the floor."""
    return log_probs.clamp(min=2 * math.log(torch.finfo(log_probs.dtype).tiny))


def _log_floored(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


COMPARISONS: dict[str, Callable[..., PerPosition]] = {
    loss.__name__: loss
    for loss in (
        *(soft_cross_entropy, forward_kl, reverse_kl, jsd, total_variation),
        *(lk_hybrid, negative_log_acceptance, top_k, rejection),
    )
}
DISTRIBUTION_LOSSES = tuple(name for name in COMPARISONS if name != "rejection")
TOKEN_LOSSES = (*DISTRIBUTION_LOSSES, "hard_cross_entropy")
# The loss that validation measures, over the target's whole vocabulary.
REJECTION = {"rejection": 1.0}


@dataclass(frozen=True, kw_only=True)
class TokenLossConfig(Settings):
    """The settings of a trainable drafter's token losses: a part of its configuration.

    losses: weight by name; a position's loss is the weighted sum. jsd_beta: weight of the target's
    distribution in the mixture of `jsd`. lk_eta: how fast `lk_hybrid` moves from KL to total
    variation. top_k: how many of the target's tokens the loss `top_k` compares.

    With a reduced vocabulary the target's distribution is renormalised over it, and positions whose
    first choice it lacks are left out (but of `rejection`): total variation and the LK losses are
    then of the acceptance of tokens that can be drafted.
    """

    section = "drafter"

    losses: dict[str, float]
    jsd_beta: limits.OpenFraction
    lk_eta: limits.NonNegativeFloat
    top_k: limits.PositiveInt

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.losses.items():
            meant = did_you_mean(name, TOKEN_LOSSES).rstrip(";")
            known, every = name in TOKEN_LOSSES or self.of_rejection, ", ".join(TOKEN_LOSSES)
            require(known, "drafter.losses", f"be one of {every}", name, meant)
            inside = 0 <= weight < math.inf
            require(inside, "drafter.losses", "be weights of at least 0", f"{name}: {weight}")
        example = "; as in drafter.losses='{soft_cross_entropy: 1.0}'"
        above = any(self.losses.values())
        require(above, "drafter.losses", "have a weight above 0", self.losses or "none", example)

    @property
    def needs_target_probs(self) -> bool:
        """Whether any of the losses compares distributions, rather than using the text alone."""
        return self.of_rejection or any(self.losses.get(name) for name in DISTRIBUTION_LOSSES)

    @property
    def of_rejection(self) -> bool:
        """Whether the loss is `rejection`, for which the target is not renormalised.

        Tokens that a reduced vocabulary lacks keep their probability, and no position is left out.
        """
        return self.losses == REJECTION

    def token_loss(self, logits: Rows, target_probs: Rows | None, labels: Labels) -> PerPosition:
        """Return the weighted sum of the losses at each position.

        target_probs: may be None unless `needs_target_probs`. labels: the text's tokens, in the
        drafter's vocabulary, NOT_A_LABEL where it lacks them.
        """
        parts = [
            weight * self._term(name, logits, target_probs, labels)
            for name, weight in self.losses.items()
            if weight
        ]
        return sum(parts[1:], start=parts[0])

    def token_loss_and_gradient(
        self, logits: Rows, target_probs: Rows | None, labels: Labels
    ) -> tuple[PerPosition, Float[Tensor, "position 1"] | float]:
        """Return `token_loss` and a factor, and overwrite the logits with a gradient; all detached.

        The gradient of the loss is the overwritten `logits` times the factor (per position, or one
        for all). The most common losses have it in closed form, in a third of autograd's passes
        over the logits; the others use autograd. logits: in float32 at least.
        """
        ((name, weight), *others) = [item for item in self.losses.items() if item[1]]
        if not others and name == "soft_cross_entropy":
            assert target_probs is not None, f"{name} compares with the target's distribution"
            log_probs = logits.log_softmax(-1)
            product = target_probs * log_probs
            if logits.device.type != "cpu":  # the host would wait for what is asked below
                product = _unless_zero(target_probs, product)
            loss = -product.sum(-1)
            odd = ~loss.isfinite()
            # 0 * -inf, which counts as zero here, or a truly infinite loss.
            if logits.device.type == "cpu" and bool(odd.any()):
                loss[odd] = soft_cross_entropy(logits[odd], target_probs[odd])
            torch._log_softmax_backward_data(target_probs, log_probs, -1, logits.dtype, out=logits)
            return weight * loss, -weight
        if not others and name == "hard_cross_entropy":
            known = (labels != NOT_A_LABEL)[:, None]
            log_probs = logits.log_softmax(-1)
            index = labels.clamp(min=0)[:, None]
            loss = torch.where(known, -log_probs.gather(-1, index), 0)[:, 0]
            torch.exp(log_probs, out=logits)
            logits.scatter_add_(-1, index, logits.new_full(index.shape, -1.0))
            return weight * loss, weight * known.to(logits.dtype)
        own = logits.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = self.token_loss(own, target_probs, labels)
            (gradient,) = torch.autograd.grad(loss.sum(), own)
        logits.copy_(gradient)
        return loss.detach(), 1.0

    def _term(
        self, name: str, logits: Tensor, target_probs: Tensor | None, labels: Tensor
    ) -> PerPosition:
        if name == "hard_cross_entropy":
            return hard_cross_entropy(logits, labels)
        assert target_probs is not None, f"{name} compares with the target's distribution"
        settings = {"jsd": self.jsd_beta, "lk_hybrid": self.lk_eta, "top_k": self.top_k}
        own = [settings[name]] if name in settings else []
        return COMPARISONS[name](logits, target_probs, *own)


@dataclass(frozen=True, kw_only=True)
class DepthLossConfig(TokenLossConfig):
    """The settings of token losses at several depths of a chain, block or row of heads.

    until_first_miss: a drafted token counts only if all tokens before it in its chain were right.
    """

    until_first_miss: bool

    @property
    def stops_at_miss(self) -> bool:
        """Whether the tokens after a miss are left out; `rejection` measures all of them."""
        return self.until_first_miss and not self.of_rejection


@dataclass(frozen=True)
class FirstMiss:
    """Which positions count: those whose chain drafted no wrong token before (arXiv:2607.01893).

    counted: whether a position counts at the first depth. before: the position that the same chain
    drafts one depth before; -1: none that is trained, so it counts. right: of each depth, where a
    position counts and its token is right; `chunked_losses` writes it.
    """

    counted: Bool[Tensor, " position"]
    before: Int[Tensor, " position"]
    right: Bool[Tensor, "depth position"]

    @classmethod
    def begin(cls, counted: Bool[Tensor, " position"], before: Tensor, depths: int) -> "FirstMiss":
        """Return chains of which nothing is known yet."""
        return cls(counted, before, counted.new_zeros(depths, len(counted)))

    @classmethod
    def along_text(
        cls,
        config: DepthLossConfig,
        rows: Int[Tensor, " position"],
        columns: Int[Tensor, " position"],
        depths: int,
    ) -> "FirstMiss | None":
        """Return the chains over positions in text order; None if the losses do not ask for them.

        A chain that drafts a token at a depth drafts the token before it at the depth before. One
        whose prediction is not trained (another turn) ends no chain: nothing is drafted there.
        """
        if not config.stops_at_miss:
            return None
        last_row, last_column = (
            functional.pad(at, (1, 0), value=-2)[:-1] for at in (rows, columns)
        )
        follows = (rows == last_row) & (columns == last_column + 1)
        before = (torch.arange(len(rows), device=rows.device) - 1).where(follows, -1)
        return cls.begin(torch.ones_like(follows), before, depths)

    def counts(self, depth: int, at: Int[Tensor, " chosen"]) -> Bool[Tensor, " chosen"]:
        """Return which of these positions count at a depth; smaller depths are written."""
        if depth == 0:
            return self.counted[at]
        before = self.before[at]
        return (before < 0) | self.right[depth - 1, before.clamp(min=0)]
