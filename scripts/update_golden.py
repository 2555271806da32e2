"""Write tests/golden/ anew; a changed default is then a visible diff, to be read."""

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

from drafttrain.config.compose import compose

TESTS = Path(__file__).resolve().parent.parent / "tests"
GOLDEN = TESTS / "golden"
# Between kernels of two processors float32 differs by less; a changed computation by more.
TOLERANCE = 1e-5


def main() -> None:
    """Compose what `train` does when told nothing, train every family five steps, write it down."""
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "config_train.yaml").write_text(OmegaConf.to_yaml(compose("train", [])))
    sys.path.insert(0, str(TESTS))
    import conftest  # noqa: F401 (one thread, offline)
    from test_golden_losses import TRAINABLE, curve

    curves = {family: curve(family) for family in TRAINABLE}
    record = {"tolerance": TOLERANCE, "curves": curves}
    (GOLDEN / "losses.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
