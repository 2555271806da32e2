"""Write tests/golden/ anew; a changed default is then a visible diff to review."""

import json
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import OmegaConf

from drafttrain.config.compose import compose

TESTS = Path(__file__).resolve().parent.parent / "tests"
GOLDEN = TESTS / "golden"
# float32 differs by less between kernels of two processors, by more if the computation changed.
TOLERANCE = 1e-5


def main() -> None:
    """Write the default configuration of `train`, fixed reports, and losses of every family."""
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "config_train.yaml").write_text(OmegaConf.to_yaml(compose("train", [])))
    sys.path.insert(0, str(TESTS))
    import conftest  # noqa: F401 (one thread, offline)
    from test_golden_losses import FAMILIES, curve
    from test_report_bytes import fixed_files

    with TemporaryDirectory() as place, chdir(place):
        for name, text in fixed_files(Path(place)).items():
            (GOLDEN / name).write_text(text)
    curves = {family: curve(family) for family in FAMILIES}
    record = {"tolerance": TOLERANCE, "curves": curves}
    (GOLDEN / "losses.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
