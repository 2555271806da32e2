"""What is declared of the project is so: its version, what it needs, its licences."""

import ast
import importlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from paths import ROOT

import drafttrain

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHER_INTERPRETERS = {"vllm"}  # imported by workers that run in an environment of its own


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    """Return the packages of requirements, without their versions."""
    return {normal(re.split(r"[<>=!~\[; ]", text)[0]) for text in requirements}


def imported(folder: Path) -> set[str]:
    """Return the packages that provide what any file imports, lazily or not."""
    provided = packages_distributions()
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            else:
                continue
            tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
            found |= {normal(provided.get(top, [top])[0]) for top in tops}
    return found - {"drafttrain"} - OTHER_INTERPRETERS


def test_the_version_is_that_of_the_newest_changes() -> None:
    newest = re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert newest is not None
    assert drafttrain.__version__ == newest[1]


def test_what_the_package_imports_is_declared_and_no_more() -> None:
    optional = names([*EXTRAS["openai"], *EXTRAS["quant"], *EXTRAS["gguf"]])
    assert imported(ROOT / "drafttrain") == names(PROJECT["dependencies"]) | optional


def test_every_declared_package_is_pinned_in_the_constraints() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in pins if not line.startswith("#")])
    declared = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert declared <= pinned


@pytest.mark.parametrize("requirement", PROJECT["dependencies"])
def test_every_dependency_has_a_lower_bound(requirement: str) -> None:
    assert ">=" in requirement


def test_the_licence_of_the_weights_is_declared_beside_that_of_the_code() -> None:
    card = (ROOT / "drafttrain/assets/tiny/README.md").read_text()
    strictest = re.search(r"strictest licence above, ([\w.-]+),", card)
    assert strictest is not None
    assert PROJECT["license"] == f"Apache-2.0 AND {strictest[1]}"
    for file in PROJECT["license-files"]:
        assert (ROOT / file).is_file(), file
    text = (ROOT / "drafttrain/assets/tiny/LICENSE").read_text()
    assert text.startswith("Creative Commons Attribution-ShareAlike 4.0 International")


@pytest.mark.parametrize(
    "file",
    sorted(file for name in ("benchmarks", "scripts") for file in (ROOT / name).glob("*.py")),
    ids=lambda file: file.name,
)
def test_what_a_script_takes_from_the_package_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drafttrain"):
            module = importlib.import_module(node.module or "")
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, node.module
