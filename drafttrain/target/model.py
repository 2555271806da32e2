"""The frozen target: hidden states for training, and a key-value cache that can be rolled back."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.ops.graphs import CAPTURES, USES, noting
from drafttrain.core.ops.grouped_attention import share_heads
from drafttrain.core.ops.ragged_cache import RaggedCache, additive, run_decoder
from drafttrain.core.ops.room import Rooms
from drafttrain.core.placed_batch import host_of
from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send_numbers
from drafttrain.core.tree import Branches
from drafttrain.core.types import PAD_DOCUMENT, Batch, TargetFeatures, TargetSpec
from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.describe import open_target, read_out, with_fingerprint
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.limits import check_structure, final_norm_of
from drafttrain.target.pretrained.models import load_model

TRIED = 8  # tokens that check a target when it is loaded
MAX_ROUNDING = 1e-5  # of a rotary frequency: float32 stays far below, bfloat16 far above


def load_target(config: ModelConfig, dtype: torch.dtype, device: str) -> "Target":
    """Load the target that `config` names, frozen, on one device (`placement` has the others)."""
    model_config, tokenizer, spec = open_target(config)
    model = load_model(config, model_config, dtype, device)
    target = Target(model, tokenizer, with_fingerprint(spec, config, dtype, device))
    target.check_readout()
    return target


class Target:
    """A frozen decoder. Nothing here has a gradient, and nothing belongs in an optimizer."""

    def __init__(self, model: Any, tokenizer: Any, spec: TargetSpec) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.spec = spec
        self.decoder = model.get_decoder()
        check_structure(model, f"model={spec.name} ({spec.architecture}) cannot be a target")
        self.layers: Sequence[nn.Module] = self.decoder.layers
        self.final_norm: nn.Module = final_norm_of(self.decoder)
        self.readout: Readout = read_out(model)
        share_heads(model)
        self.eager = model.config._attn_implementation == "eager"
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.rooms: Rooms | None = None  # where passes are captured
        self.placed = ""  # where the target is, and why
        # Which layers are where, if their weights are not whole on one device of this process.
        self.where = ""
        self.config: ModelConfig | None = None  # None where no configuration named the target

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, and that of the features."""
        return self.readout.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.readout.embedding.device

    @torch.no_grad()
    def features(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        """Return hidden states from one forward pass without the output head.

        Captured id i is the input of layer i; id num_layers is the input of the final norm.
        Attention never crosses documents; values at padding are meaningless (but finite).
        """
        tokens, host = batch.tokens, host_of(batch)
        self._refuse_beyond(tokens.shape[1], host.positions)
        if one_document_per_row(host):
            # Right padding and causality: no real token can see padding, so no mask is needed.
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            mask = None
        else:
            positions = batch.positions
            same = batch.document[:, :, None] == batch.document[:, None, :]
            mask = same.tril()[:, None]
            mask = additive(mask, self.dtype) if self.eager else mask
        with self._capturing(captures) as captured:
            output = self.decoder(
                input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
            )
        return TargetFeatures(captured, output.last_hidden_state, self.readout)

    @property
    def own_model(self) -> Any:
        """The Transformers model, for callers that copy weights of its layers.

        Where the layers are not whole in this process, any use of it raises ValueError.
        """
        return Scattered(self.where) if self.where else self.model

    def in_step(self) -> AbstractContextManager[None]:
        """Let ranks take different numbers of steps; a whole target needs nothing for that."""
        return nullcontext()

    def use_graphs(self) -> str | None:
        """Run the passes over caches by graphs from now on; return why that cannot be, else None.

        Graphs are trusted once they have answered as passes without them do, at lengths that they
        were not captured at.
        """
        capture = CAPTURES.get(self.device.type)
        if capture is None:
            return f"{self.device.type} is not a device whose passes can be captured"
        if self.where:
            return f"the target is in several places ({self.where})"
        problems: list[str] = []
        try:
            expected = self._in_steps()
            self.rooms = Rooms(noting(capture, lambda error: problems.append(shown(error, 200))))
            found = self._in_steps()
        finally:
            self.rooms = None
        if problems:
            return f"{self.spec.architecture} cannot be captured: {problems[0]}"
        most = torch.finfo(self.dtype).eps ** 0.5 * expected.norm()
        if not (found - expected).norm() <= most:
            return f"{self.spec.architecture} answers otherwise by graphs"
        self.rooms = Rooms(capture)
        return None

    @torch.no_grad()
    def _in_steps(self) -> Float[Tensor, "step 2 vocab"]:
        """Return logits of passes over two tokens: one is captured, and then at a new length."""
        tokens = torch.arange(TRIED, device=self.device)[None] % self.spec.vocab_size
        cache, found = self.begin(), []
        self.step(cache, tokens[:, :3])
        for start in (*[3] * USES, 4, 6):
            self.rollback(cache, [start])
            found.append(self.step(cache, tokens[:, start : start + 2], captures=(0,))[0][0])
        return torch.stack(found).float()

    def begin(self) -> RaggedCache:
        """Return an empty cache; the first step fixes its number of rows."""
        return RaggedCache(rooms=self.rooms)

    @torch.no_grad()
    def step(
        self,
        cache: RaggedCache,
        tokens: Int[Tensor, "batch new"],
        captures: tuple[int, ...] = (),
        counts: Sequence[int] | None = None,
        last_only: bool = False,
        branches: Branches | None = None,
    ) -> tuple[Float[Tensor, "batch scored vocab"], TargetFeatures]:
        """Append tokens to the cache; return their logits and features.

        Row r has counts[r] real tokens, then padding (None: all are real); what is returned for
        padding is meaningless. last_only: logits of each row's last real token only. branches: the
        tokens are those of a tree; None: each follows the one before.
        """
        new = tokens.shape[1]
        if branches is None:  # a tree's positions are fewer than its tokens: the caller counts
            self._refuse_beyond(max(cache.lengths, default=0) + new)
        cache.branches = branches

        def decode(**told: Any) -> tuple[Tensor, ...]:
            with self._capturing(captures) as captured:
                final = self.decoder(**told).last_hidden_state
            return final, *(captured[layer] for layer in captures)

        scores = self.dtype if self.eager else None
        final, *states = run_decoder(decode, cache, tokens, counts, scores, key=captures)
        captured = dict(zip(captures, states, strict=True))
        scored = final
        if last_only and counts is not None and min(counts) < new:
            last = send_numbers(counts, final.device) - 1
            scored = final[torch.arange(len(final), device=final.device), last][:, None]
        elif last_only:
            scored = final[:, -1:]
        return self.readout.logits(scored), TargetFeatures(captured, final, self.readout)

    def keep(self, cache: RaggedCache, starts: Sequence[int], path: Tensor) -> None:
        cache.keep(starts, path)

    def rollback(self, cache: RaggedCache, lengths: Sequence[int]) -> None:
        cache.rollback(lengths)

    def select(self, cache: RaggedCache, rows: Sequence[int]) -> None:
        cache.select(rows)

    @torch.no_grad()
    def check_readout(self) -> None:
        """Raise ValueError unless the readout and the cache give what the model itself computes.

        With a wrong readout a drafter would train without an error, and its drafts would all be
        rejected. After a rollback the cache must answer as if the drafts had never been there. A
        few tokens do not reveal wrong rotary frequencies: these are compared directly.
        """
        self._check_rotation()
        length = min(TRIED, self.spec.vocab_size, self.spec.max_positions)
        tokens = torch.arange(length, device=self.device)[None]
        expected = self.model(input_ids=tokens, use_cache=False).logits
        self._check_finite(expected)
        logits, features = self.step(self.begin(), tokens, captures=(0,))
        embedded = features.captured[0]
        if embedded.shape != (1, length, self.spec.hidden_size):
            raise self._unknown(f"gives its layers states of shape {tuple(embedded.shape)}")
        for what, ours, theirs in (
            ("embeds tokens", embedded, self.readout.embed(tokens)),
            ("computes logits", logits, expected),
        ):
            size = theirs.float().abs().max()
            if not (ours.float() - theirs.float()).abs().max() <= 0.02 * size:
                raise self._unknown(what)
        stepped = self._with_rejected_drafts(tokens).float() - expected.float()
        # A norm, not the largest error: near-tied experts differ between two kernels.
        if not stepped.norm() <= 0.1 * expected.float().norm():
            raise self._unknown("keeps what rejected drafts left in its cache, or reads its cache")

    def _with_rejected_drafts(self, tokens: Int[Tensor, "1 seq"]) -> Float[Tensor, "1 seq vocab"]:
        cache, half, wrong = self.begin(), tokens.shape[1] // 2, tokens.flip(1)
        parts = [self.step(cache, tokens[:, :half])[0]] if half else []
        for start, stop in ((half, half + 1), (half + 1, tokens.shape[1])):
            if start < stop:
                self.step(cache, wrong[:, start:stop])
                self.rollback(cache, [start])
                parts.append(self.step(cache, tokens[:, start:stop])[0])
        return torch.cat(parts, dim=1)

    def _check_finite(self, logits: Tensor) -> None:
        if bool(logits.isfinite().all()):
            return
        named = self.model.named_parameters()
        wrong = next((name for name, weight in named if not bool(weight.isfinite().all())), None)
        where = f"{wrong} holds NaN or infinity" if wrong else f"they overflow in {self.dtype}"
        raise ValueError(
            f"model={self.spec.name} ({self.spec.architecture}) must give finite logits, and gives"
            f" NaN or infinity: {where}; check the weights, or use another hardware.dtype"
        )

    def _check_rotation(self) -> None:
        rotary: Any = getattr(self.decoder, "rotary_emb", None)
        if not type(rotary).__module__.startswith("transformers.models."):
            return
        with torch.device("cpu"):
            fresh = dict(type(rotary)(rotary.config).named_buffers())
        for name, buffer in rotary.named_buffers():
            if not name.endswith("inv_freq") or name not in fresh:
                continue
            right = fresh[name].double()
            error = (buffer.cpu().double() - right).abs()
            if not bool((error <= MAX_ROUNDING * right).all()):
                angle = float(error.max()) * (self.spec.max_positions - 1)
                raise ValueError(
                    f"model={self.spec.name} rotates position {self.spec.max_positions - 1} by"
                    f" {angle:.3g} radians more or less than its configuration says ({name} came"
                    f" as {buffer.dtype}): loading rounded it; update Transformers and DeepSpeed"
                )

    def _unknown(self, what: str) -> ValueError:
        return ValueError(
            f"model={self.spec.name} ({self.spec.architecture}) {what} in a way that drafttrain"
            " does not know; it cannot be a target yet"
        )

    def _refuse_beyond(self, length: int, positions: Tensor | None = None) -> None:
        most = self.spec.max_positions
        if length <= most or (positions is not None and int(positions.max()) < most):
            return
        raise ValueError(
            f"{length} tokens must fit in the {self.spec.context}; shorten the prompt or the output"
        )

    @contextmanager
    def _capturing(self, captures: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        self.spec.check_layers(captures)
        captured: dict[int, Tensor] = {}

        def keep(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            captured[layer] = (args[0] if args else kwargs["hidden_states"]).to(self.device)

        with ExitStack() as hooks:
            for layer in captures:
                module = self.final_norm if layer == len(self.layers) else self.layers[layer]
                hook = module.register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
                hooks.enter_context(hook)
            yield captured


class Scattered:
    """A placeholder for a model whose layers are not whole here: any use raises ValueError."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "a drafter that takes layers of the target needs them whole in every process, and"
            f" hardware.target_placement partitioned them ({self.where}); use"
            " hardware.target_placement=device, or give the drafter a model of its own"
            " (drafter.path=DIR)"
        )


def one_document_per_row(batch: Batch) -> bool:
    """Return whether every row is one document from its first token on, then padding."""
    real = batch.document != PAD_DOCUMENT
    same = (batch.document == batch.document[:, :1]) | ~real
    return bool((same & (real[:, :-1] >= real[:, 1:]).all()).all())
