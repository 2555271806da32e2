"""Write the model of a GGUF file as a directory of safetensors, for vLLM or another program.

    python scripts/dequantize.py SmolLM2-135M-Instruct.Q4_1.gguf outputs/smollm2

drafttrain itself reads GGUF (model.path=FILE) and needs no such directory.
"""

import argparse
import sys
from pathlib import Path

from drafttrain.target.pretrained.gguf import file_of, write_directory


def main() -> int:
    """Write the directory; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the file, or a directory that holds one")
    parser.add_argument("out", type=Path, help="the directory to write; it must not exist yet")
    given = parser.parse_args()
    try:
        file = file_of(given.gguf, str(given.gguf))
        if file is None:
            raise ValueError(f"{given.gguf} must be a GGUF file, or a directory that holds one")
        if given.out.exists():
            raise ValueError(f"{given.out} must not exist yet; name another directory")
        write_directory(file, given.out, str(given.gguf))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
