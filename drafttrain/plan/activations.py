"""What a micro batch takes: features, the target's pass, what a drafter keeps for its backward.

Counted tensor by tensor as the training forwards of `drafters/` keep them; tests compare it with
what they keep indeed.
"""

from drafttrain.plan.drafter import Decoder, DrafterParts
from drafttrain.plan.shapes import Shape
from drafttrain.plan.throughput import Load

# As `chunked` has them: logits exist for this many elements at a time.
CHUNK_ELEMENTS = {True: 1 << 22, False: 1 << 28}  # by whether it is a CPU
FEWEST_POSITIONS = 128
# Float32 tensors as large as a chunk's logits at the peak of a loss: the target's law, the logits,
# their logarithm and a product. Against the text alone: the logits and their logarithm.
LOSS_COPIES, LOSS_COPIES_TEXT = 4, 2
OWN_LAYERS = ("eagle", "eagle3")  # the others' layers are those of Transformers


def feature_bytes(parts: DrafterParts, hidden_size: int, dtype_bytes: int) -> int:
    """Return the bytes of one token's features: the captured layers and the final hidden state."""
    return (len(parts.captures) + 1) * hidden_size * dtype_bytes


def target_activations(shape: Shape, load: Load) -> float:
    """Return the peak of the target's pass, beside its weights and the features that stay.

    In the feed-forward layer: the stream, its norm, and three of gate, its activation, up, product.
    """
    width = 2 if load.dtype == "bfloat16" else 4
    query = shape.num_attention_heads * shape.head_dim
    keys = 2 * shape.num_key_value_heads * shape.head_dim
    feed_forward = 2 * shape.hidden_size + 3 * shape.intermediate_size
    attention = 2 * shape.hidden_size + 3 * query + 2 * keys
    return float(load.tokens * width * max(feed_forward, attention))


def drafter_activations(parts: DrafterParts, shape: Shape, load: Load) -> float:
    """Return the peak of the drafter's forward and backward, beside weights and features."""
    width = 2 if load.dtype == "bfloat16" else 4
    tokens, trained = load.tokens, load.tokens * load.loss_share
    decoder, passes = parts.decoder, parts.decoder.num_layers * parts.decoder.unroll
    in_parts = load.on_cpu and parts.family not in OWN_LAYERS
    layer = layer_bytes(decoder, width, in_parts, parts.family)
    ends = decoder.width * width  # the stream that enters the first layer
    kept, again = float(passes * layer + ends), 0.0
    if load.checkpointing and passes:
        # Only what enters a layer is kept, and the keys of the depths before; one runs again.
        keys = 2 * decoder.num_kv_heads * decoder.head_dim * width
        kept, again = float(passes * (decoder.width * width + keys) + ends), float(layer)
    per_token = kept + again
    per_trained = 0.0
    if parts.family == "eagle3":
        per_token += parts.fused * width  # what fc reads
        # Of the embedding, which all depths read: its norm's input and the normed values.
        per_token += decoder.width * 2 * width
        # Of each depth: the state before the head, and its gradient.
        per_token += parts.heads * 2 * decoder.width * width
    elif parts.family == "eagle":
        per_token += parts.fused * width
        per_trained += 3 * decoder.width * width  # predicted, true, and the gradient
    elif parts.family == "medusa":
        blocks = parts.fused
        per_trained += parts.heads * shape.hidden_size * width * (2 * blocks + 2)
    else:
        per_token += norm_bytes(decoder.width, width, in_parts) + 2 * decoder.width * width
    joined = 0
    if parts.family == "eagle3":  # the three projections, side by side for all depths
        rows = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
        joined = decoder.input_width * rows * (4 if width == 4 else 0)
    if decoder.num_layers:
        per_token += decoder.unroll * 2 * decoder.head_dim * width  # rotations
    kept = tokens * per_token + trained * per_trained + joined
    return kept + loss_bytes(parts, shape, load)


def layer_bytes(decoder: Decoder, width: int, in_parts: bool, family: str) -> int:
    """Return what one layer keeps of one token for the backward pass.

    Attention is a flash kernel's: queries, keys, values and the mixture, no scores.
    """
    seen = width if width == 4 or not in_parts else 0  # a norm keeps its input as it is
    stream = decoder.width * seen
    norm = norm_bytes(decoder.width, width, in_parts)
    query = decoder.num_heads * decoder.head_dim
    keys = decoder.num_kv_heads * decoder.head_dim
    # Ours keeps gate, up and their product; Transformers' the activated gate as well.
    inner = decoder.intermediate_size * (3 if family in OWN_LAYERS else 4)
    kept = width * (2 * query + 2 * keys + decoder.width + inner)
    kept += stream + norm  # after attention
    if decoder.qk_norm:
        kept += (query + keys) * seen + norm_bytes(query + keys, width, in_parts)
    if family == "eagle":  # no norm before attention, which reads the stream itself
        return kept
    kept += decoder.width * width  # what queries, keys and values are made from
    return kept + stream + norm


def norm_bytes(size: int, width: int, in_parts: bool) -> int:
    """Return what a norm keeps beside its input: ours and a GPU's kernel nothing.

    torch's on a CPU is made of parts, in float32: the normed values, and the input where that is
    not.
    """
    if not in_parts:
        return 0
    return 4 * size if width == 4 else 8 * size


def loss_bytes(parts: DrafterParts, shape: Shape, load: Load) -> float:
    """Return what the chunked losses take: a chunk's logits, and the gradient of trained heads."""
    trained = load.tokens * load.loss_share
    width = 2 if load.dtype == "bfloat16" else 4
    target = shape.vocab_size if parts.needs_target_law else 0
    largest = max(parts.draft_vocab, target)
    budget = CHUNK_ELEMENTS[load.on_cpu]
    chunk = min(trained, max(FEWEST_POSITIONS, budget // largest))
    copies = LOSS_COPIES if parts.needs_target_law else LOSS_COPIES_TEXT
    if parts.family == "eagle3":  # depths share a head: as many at once as a chunk has room for
        together = max(1, int(budget // (chunk * parts.draft_vocab)))
        copies += min(parts.heads, together) - 1
    law = 0
    if target > parts.draft_vocab:  # the whole vocabulary first, then what of it can be drafted
        law = target * (4 + (width if width < 4 else 0)) + 8 * parts.draft_vocab
    found = chunk * max(law, 4 * copies * parts.draft_vocab)
    for matrix in parts.matrices:
        if "head" in matrix.name and not parts.lends_head:
            found += 4 * matrix.weights  # its gradient, until the backward pass hands it over
    return float(found)
