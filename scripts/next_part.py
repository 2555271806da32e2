"""Choose the part of the rotation that CI runs with a submission: `.ci/part.json`.

    python scripts/next_part.py            # last before a submission; then commit
    python scripts/next_part.py check      # ends with 1 where the file was not moved (CI runs this)
    python scripts/next_part.py changed    # the files that the submission changes

CI runs everything that every change must pass, and one tenth of the rest: `.ci/run` lists the ten
parts. The file names the part, the commit that the submission is based on, and a digest of every
other file. A submission moves the part once, however often this script runs: it counts from the
part that the base names. The digest differs, and the check fails, where something was committed
afterwards, so a submission that did not move the part cannot pass.

The base is the branch's upstream, else the commit at which this clone's branch was made, else
`--base REV`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ".ci/part.json"
PARTS = 10


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what a git command prints; SystemExit with its message where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def digest(root: Path = ROOT) -> str:
    """Return a digest of all files of HEAD (names, modes and contents) but the part's own."""
    listed = git("ls-tree", "-r", "HEAD", root=root).splitlines()
    others = "\n".join(line for line in listed if not line.endswith(f"\t{FILE}"))
    hashed = subprocess.run(
        ["git", "hash-object", "--stdin"], cwd=root, input=others, capture_output=True, text=True
    )
    return hashed.stdout.strip()


def base_of(root: Path = ROOT) -> str:
    """Return the commit that this branch's submission is based on."""
    asked = ["git", "merge-base", "HEAD", "@{upstream}"]
    upstream = subprocess.run(asked, cwd=root, capture_output=True, text=True)
    if upstream.returncode == 0:
        return upstream.stdout.strip()
    branch = git("rev-parse", "--abbrev-ref", "HEAD", root=root)
    history = git("reflog", "show", "--format=%H", branch, root=root).splitlines()
    if not history:
        sys.exit("next_part: no upstream and no reflog tell the base; name it with --base REV")
    return history[-1]


def part_at(commit: str, root: Path = ROOT) -> int:
    """Return the part that a commit names, 0 where it names none."""
    asked = ["git", "show", f"{commit}:{FILE}"]
    shown = subprocess.run(asked, cwd=root, capture_output=True, text=True)
    return int(json.loads(shown.stdout)["part"]) if shown.returncode == 0 else 0


def moved(base: str, root: Path = ROOT) -> dict[str, Any]:
    """Return the contents of the file for a submission of HEAD that is based on `base`."""
    part = part_at(base, root) % PARTS + 1
    return {"part": part, "base": base, "digest": digest(root)}


def check(root: Path = ROOT) -> str | None:
    """Return what is wrong with the file at HEAD, or None."""
    named = json.loads(git("show", f"HEAD:{FILE}", root=root))
    if named["digest"] != digest(root):
        return f"{FILE} was not moved since the last change; run scripts/next_part.py and commit it"
    if named["part"] != part_at(named["base"], root) % PARTS + 1:
        return f"{FILE} must name the part that follows the one of its base {named['base'][:7]}"
    return None


def main() -> int:
    """Move the part, check it, or list what the submission changes; return the exit status."""
    parser = argparse.ArgumentParser(description="The part of CI's rotation that runs next.")
    parser.add_argument("action", nargs="?", default="move", choices=("move", "check", "changed"))
    parser.add_argument("--base", help="the commit that the submission is based on")
    arguments = parser.parse_args()
    if arguments.action == "check":
        wrong = check()
        print(wrong or "the part was moved after the last change")
        return 1 if wrong else 0
    if arguments.action == "changed":
        named = json.loads((ROOT / FILE).read_text())
        print(git("diff", "--name-only", arguments.base or named["base"], "HEAD"))
        return 0
    if git("status", "--porcelain", "--untracked-files=no", "--", f":!{FILE}"):
        sys.exit("next_part: commit the other changes first; the digest is that of HEAD")
    contents = moved(git("rev-parse", arguments.base) if arguments.base else base_of())
    (ROOT / FILE).write_text(json.dumps(contents, indent=2) + "\n")
    print(f"part {contents['part']}; now commit {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
