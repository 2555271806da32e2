"""Write tests/golden/ anew; a changed default is then a visible diff, to be read."""

from pathlib import Path

from omegaconf import OmegaConf

from drafttrain.config import compose

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"


def main() -> None:
    """Compose what `train` does when told nothing, and write it down."""
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "config_train.yaml").write_text(OmegaConf.to_yaml(compose("train", [])))


if __name__ == "__main__":
    main()
