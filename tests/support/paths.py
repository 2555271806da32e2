"""Where the project lies, for tests and for what they start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
FOLDERS = sorted({file.parent for file in (ROOT / "tests").rglob("*.py")})
PYTHONPATH = os.pathsep.join(map(str, [ROOT, *FOLDERS]))
