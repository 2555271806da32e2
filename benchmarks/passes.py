"""What passes of a target cost on this machine, against the bound that memory sets: --help.

A random Llama of the given shape, as passes cost the same whatever the weights are. Its plain
decoding is compared with the time that reading the weights once takes, by the bandwidth of a copy
on the same device; a pass over a tree of 60 nodes with a pass over one token.
"""

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import TargetSpec
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.clock import clock_of
from drafttrain.decode.policy import shape_of, tree_of_widths
from drafttrain.runtime.hardware import TORCH_DTYPES
from drafttrain.target.model import Target

# layers, width, width of the feed-forward layer, heads, key-value heads, vocabulary
SHAPES = {
    "8b": (32, 4096, 14336, 32, 8, 128256),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "tiny": (4, 256, 1024, 8, 4, 4096),
}
TREE = tree_of_widths([4, 2, 2, 1, 1])  # 4 + 8 + 16 + 16 + 16
BANDWIDTH, TREE_COST = 0.70, 1.15  # what is expected: of the bound at least, of one token at most


def random_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    """Return a Llama of random weights, made where it stays."""
    layers, width, inner, heads, kv_heads, vocab = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_layers": layers}
    spec = TargetSpec(
        **sizes, name=f"random {shape}", fingerprint="", architecture="llama",
        head_dim=width // heads, rms_norm_eps=config.rms_norm_eps, rope_theta=10000.0,
        max_positions=4096, eos_token_ids=(), bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Target(model, None, spec)


def bandwidth(device: torch.device) -> float:
    """Return bytes per second that a copy on the device reads and writes."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 27), dtype=torch.uint8)
    source = source.to(device)
    there, now, taken = torch.empty_like(source), clock_of(device), []
    for _ in range(8):
        started = now()
        there.copy_(source)
        taken.append(now() - started)
    return 2 * source.numel() / median(taken)


@torch.inference_mode()
def pass_seconds(target: Target, context: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a pass over one token and over the tree, in turns."""
    now, vocab = clock_of(target.device), target.spec.vocab_size
    shape, _ = shape_of(TREE, target.device)
    assert shape is not None
    cache = target.begin()
    target.step(cache, torch.randint(vocab, (1, context), device=target.device), last_only=True)
    taken: dict[int, list[float]] = {1: [], TREE.num_nodes + 1: []}
    for turn in range(rounds + 2):
        for width in taken:
            tokens = torch.randint(vocab, (1, width), device=target.device)
            started = now()
            target.step(cache, tokens, branches=None if width == 1 else shape.with_root)
            ended = now()
            target.rollback(cache, [context])
            if turn >= 2:
                taken[width].append(ended - started)
    one, tree = (median(values) for values in taken.values())
    return one, tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="bfloat16")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of plain decoding")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    told = parser.parse_args()
    target = random_target(told.shape, told.device, TORCH_DTYPES[told.dtype])
    problem = target.use_graphs() if told.graphs else "as asked"
    print(f"passes are not captured: {problem}" if problem else "passes are captured")
    # All weights are read for each token but the table of embeddings, of which one row is.
    table = target.readout.embedding
    read = sum(p.numel() * p.element_size() for p in target.model.parameters())
    bound = (read - table.numel() * table.element_size()) / bandwidth(target.device)
    settings: dict[str, Any] = {"sampling": GREEDY, "chance": SeededChance(0), "stop_tokens": ()}
    prompt = list(range(1, told.context + 1))
    for _ in range(2):  # the first one warms up
        started = time.perf_counter()
        stats = autoregressive_decode(target, prompt, max_new_tokens=told.tokens, **settings).stats
        wall = time.perf_counter() - started
    step = (wall - stats.prefill_s) / max(told.tokens - 1, 1)
    one, tree = pass_seconds(target, told.context, told.rounds)
    share, cost = bound / step, tree / one
    print("| measure | value | expected |\n|---|---|---|")
    print(f"| plain decoding, {target.spec.name} in {told.dtype} | {1 / step:.1f} tokens/s | |")
    print(f"| share of the bandwidth bound ({1e3 * bound:.2f} ms) | {share:.2f} | >= {BANDWIDTH} |")
    print(f"| a pass over one token | {1e3 * one:.2f} ms | |")
    print(f"| a pass over {TREE.num_nodes} nodes, of one token | {cost:.2f} | <= {TREE_COST} |")
    return 0 if share >= BANDWIDTH and cost <= TREE_COST else 1


if __name__ == "__main__":
    sys.exit(main())
