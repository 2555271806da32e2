"""Print pins of the lowest versions that pyproject.toml allows, for a job that tests them.

    python scripts/lowest_versions.py > lowest.txt

Torch is left out: its available builds differ from index to index, so the job takes the one of
constraints.txt.
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def pins(requirements: list[str]) -> list[str]:
    """Return `name==version` for every `name>=version`, except for torch."""
    found = [re.fullmatch(r"([\w.-]+)>=([\w.]+)", text) for text in requirements]
    assert all(found), requirements
    return [f"{match[1]}=={match[2]}" for match in found if match and match[1] != "torch"]


def main() -> None:
    """Print pins of what the package and its tests need; tools are not pinned."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    tests = [
        text
        for text in project["optional-dependencies"]["dev"]
        if text.startswith(("beartype", "openai", "pytest"))
    ]
    print("\n".join(pins(project["dependencies"] + tests)))


if __name__ == "__main__":
    main()
