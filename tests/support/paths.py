"""Where the project lies, for tests and for what they start."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
FOLDERS = sorted({file.parent for file in (ROOT / "tests").rglob("*.py")})
PYTHONPATH = os.pathsep.join(map(str, [ROOT, *FOLDERS]))


def load_script(name: str) -> ModuleType:
    """Return a script of scripts/, loaded anew, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
