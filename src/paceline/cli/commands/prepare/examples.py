"""`paceline examples`: writes examples, lock files and docs from the wheel, for people without a clone."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from paceline.core.errors import ConfigError, EnvironmentLackError

# Only wheels have this folder; pyproject.toml says what it holds.
SHIPPED = Path(__file__).parents[3] / "shipped"

_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
"""A link to a file: its text, and the file's path"""

_NEXT = """\
The first example takes some minutes on two cores, without a GPU:
{cd}
  pip install --no-deps {torch} --index-url https://download.pytorch.org/whl/cpu
  pip install --no-deps -r requirements/cpu.txt
  python examples/arithmetic/prepare.py
  paceline sft examples/arithmetic/sft.yaml
  paceline train examples/arithmetic/ppo.yaml
On a machine with NVIDIA GPUs, replace the pip commands by
  pip install --no-deps -r requirements/cuda.txt
docs/start.md says what these do, and what to do if an address cannot be reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), help="folder to write into (default: this one)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the folders and prints the commands of the first example; returns the exit code."""
    if not SHIPPED.is_dir():
        raise EnvironmentLackError(
            "this Paceline was not installed from a wheel, and only wheels bring the examples; "
            "take those of the clone, in its folder examples"
        )
    folders = sorted(path.name for path in SHIPPED.iterdir())
    if there := [str(path) for name in folders if (path := args.folder / name).exists()]:
        raise ConfigError(
            f"nothing was written, because {there[0]} exists; name an empty folder: paceline examples FOLDER"
        )
    shutil.copytree(SHIPPED, args.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for page in sorted(args.folder.glob("docs/**/*.md")) + sorted(args.folder.glob("examples/**/*.md")):
        _unlink_what_a_clone_has(page)
    print(f"wrote {', '.join(str(args.folder / name) for name in folders)}")
    lock = (args.folder / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    torch = "".join(re.findall(r"^torch==\S+", lock, re.MULTILINE))
    print(_NEXT.format(cd=f"  cd {args.folder}", torch=torch).replace("  cd .\n", ""))
    return 0


def _unlink_what_a_clone_has(page: Path) -> None:
    """Leaves only the text of a page's links to files that are not here, such as those under benchmarks/."""

    def linked(link: re.Match[str]) -> str:
        return link[0] if (page.parent / link[2]).exists() else link[1]

    page.write_text(_LINK.sub(linked, page.read_text(encoding="utf-8")), encoding="utf-8")
