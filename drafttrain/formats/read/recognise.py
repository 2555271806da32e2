"""Which kind of drafter a directory holds, and what that is seen by."""

import re
from dataclasses import dataclass

from drafttrain.formats.read.folder import Folder
from drafttrain.runtime.untrusted_input import shown

EAGLE3, SPECULATORS, EAGLE = "eagle3", "speculators", "eagle"
MEDUSA, FASTER_DECODING, CAUSAL_LM = "medusa", "fasterdecoding", "causal_lm"
TITLES = {
    EAGLE3: "EAGLE-3 in the native layout",
    SPECULATORS: "EAGLE-3 in the speculators format",
    EAGLE: "EAGLE-1 in SafeAILab's layout",
    MEDUSA: "Medusa in vLLM's layout",
    FASTER_DECODING: "Medusa in FasterDecoding's layout",
    CAUSAL_LM: "a causal language model of Transformers",
}
RESIDUAL_BLOCK = re.compile(r"(?:medusa_heads\.)?\d+\.\d+\.linear\.weight")


@dataclass(frozen=True)
class Recognised:
    """A kind of drafter, and by what it was recognised."""

    kind: str
    because: str

    def __str__(self) -> str:
        return f"{TITLES[self.kind]}, by {self.because}"


def recognise(folder: Folder) -> Recognised:
    """Say what a directory holds, from config.json and the names of its tensors.

    Tensors decide where architectures cannot: SafeAILab calls every drafter LlamaForCausalLM.
    Raises ValueError for what no part of this package can draft with, by its name.
    """
    config, names = folder.config, folder.names
    listed = config.get("architectures")
    architectures = [shown(name) for name in listed[:8]] if isinstance(listed, list) else []
    model_type = config.get("model_type")
    by_architecture = f"architectures={architectures}"
    speculators = config.get("speculators_model_type")
    if speculators == "eagle3":
        return Recognised(SPECULATORS, "speculators_model_type=eagle3")
    if speculators is not None:
        raise _unknown(
            folder, f"speculators_model_type={shown(speculators)}, of which only eagle3 is"
        )
    if any("Eagle3" in name for name in architectures):
        return Recognised(EAGLE3, by_architecture)
    if any("Eagle" in name for name in architectures):
        return Recognised(EAGLE, by_architecture)
    if "MedusaModel" in architectures or model_type == "medusa":
        because = by_architecture if "MedusaModel" in architectures else "model_type=medusa"
        faster = next(filter(RESIDUAL_BLOCK.fullmatch, sorted(names)), None)
        if faster is not None:
            return Recognised(FASTER_DECODING, f"{because} and the tensor {faster}")
        return Recognised(MEDUSA, because)
    for kind, name in (
        (EAGLE3, "midlayer.hidden_norm.weight"),
        (EAGLE3, "layers.0.hidden_norm.weight"),
        (EAGLE3, "d2t"),
        (EAGLE, "fc.weight"),
        (MEDUSA, "blocks.0.layers.0.weight"),
        (FASTER_DECODING, "0.0.linear.weight"),
        (FASTER_DECODING, "medusa_heads.0.0.linear.weight"),
    ):
        if name in names:
            return Recognised(kind, f"the tensor {name}")
    if "medusa_num_heads" in config:
        return Recognised(FASTER_DECODING, "medusa_num_heads in config.json")
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return Recognised(CAUSAL_LM, by_architecture)
    what = by_architecture if architectures else f"model_type={shown(model_type)}"
    raise _unknown(
        folder, f"{what} and tensors such as {shown(', '.join(sorted(names)[:3]))}, which are"
    )


def _unknown(folder: Folder, what: str) -> ValueError:
    known = "; ".join(TITLES.values())
    return ValueError(
        f"drafter.path={folder.path} has {what} not known here; it must be one of: {known}"
    )
