"""vLLM as a second witness: the same prompts and drafter through a real engine, beside our loop."""

from drafttrain.witness.compare import (
    Agreement,
    Disagreement,
    Ours,
    Prediction,
    compare_with_ours,
    predict,
    predicted_speedup,
)
from drafttrain.witness.engine import BatchWitness, Measured, Witness, witness
from drafttrain.witness.section import Asked, Served, asked_of, check_witness, witness_section

__all__ = [
    "Agreement",
    "Asked",
    "BatchWitness",
    "Disagreement",
    "Measured",
    "Ours",
    "Prediction",
    "Served",
    "Witness",
    "asked_of",
    "check_witness",
    "compare_with_ours",
    "predict",
    "predicted_speedup",
    "witness",
    "witness_section",
]
