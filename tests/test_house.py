"""Rules of the house that a reader of the source would have to check by eye."""

import ast
import re
from collections.abc import Iterator

from test_floors import MODULES

# What is changed while it is read or decoded. All else that a dataclass holds is a result.
CHANGES = {
    *("Request", "RankCounts", "Text", "Values", "Reading", "Row"),
    *("SkipReport", "Counters", "DecodeStats"),
}
# A journal that is complete gets its last name, a checkpoint that is deleted is hidden first.
RENAMES = {"runtime.disk", "evaluation.measurements"}


def thawed(source: str) -> list[str]:
    """Return the dataclasses that are not frozen, but for the states of drafters."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and not node.name.endswith("State")
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass") and "frozen=True" not in decorator
    ]


def renames(source: str) -> list[str]:
    """Return the calls that give a file another name."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in ("rename", "renames")
        or (call.func.attr == "replace" and len(call.args) == 1 and not call.keywords)
        or ast.unparse(call.func) in ("os.replace", "shutil.move")
    ]


def replaced(source: str) -> Iterator[str]:
    """Yield what is assigned to an attribute of something imported, and every own `forward`."""
    tree, imported = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        else:
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
        for target in targets:
            root: ast.expr = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(target, ast.Attribute) and (
                (isinstance(root, ast.Name) and root.id in imported)
                or target.attr in ("forward", "__call__")
            ):
                yield ast.unparse(target)


def test_a_result_is_frozen() -> None:
    assert thawed("@dataclass\nclass A: ...\n@dataclass(frozen=True)\nclass B: ...") == ["A"]
    found = {name for source in MODULES.values() for name in thawed(source)}
    assert found == CHANGES


def test_files_and_folders_are_replaced_in_one_place() -> None:
    assert renames("a.rename(b)\nos.replace(a, b)\na.replace(b)\ntext.replace('a', 'b')") == [
        *("a.rename(b)", "os.replace(a, b)", "a.replace(b)"),
    ]
    assert {module for module, source in MODULES.items() if renames(source)} == RENAMES


def test_nothing_of_a_library_is_replaced() -> None:
    source = "import torch\nmodel.forward = f\ntorch.nn.functional.silu = g\nself.size = 1"
    assert list(replaced(source)) == ["model.forward", "torch.nn.functional.silu"]
    found = {module: list(replaced(source)) for module, source in MODULES.items()}
    settings = {"core.ops.layer_calls": ["torch._dynamo.config.recompile_limit"]}
    assert {module: names for module, names in found.items() if names} == settings


def test_a_module_is_named_by_a_noun() -> None:
    ending = re.compile(r"(ing|ed)$")
    known = {"training", "serving", "sampling", "rounding", "deepspeed"}  # nouns of the field
    known |= {"pretrained", "served", "sharded", "shared", "teacher_forced"}  # kinds of a thing
    named = {part for module in MODULES for part in module.split(".")}
    assert {name for name in named if ending.search(name)} - known == set()
