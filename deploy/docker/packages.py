"""Installs the packages that a service needs, only from the lock file.

    python packages.py LOCK [EXTRA ...]     the project's own requirements and those of its extras
    python packages.py LOCK --everything    every line of the lock file, without resolving dependencies

Runs in the build stage of each service's image, with that image's pip. torch comes from pip's own index, or
from TORCH_INDEX if pip's index does not have the lock file's build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PIP = (sys.executable, "-m", "pip")
# Packages that every virtual environment has.
_OF_THE_ENVIRONMENT = {"pip", "setuptools"}


def main(lock: Path, words: list[str]) -> int:
    """Installs packages and compares them with the lock file; returns the exit code."""
    if words == ["--everything"]:
        chosen = ["--no-deps", "--requirement", str(lock)]
    else:
        requirements = _requirements(Path("pyproject.toml"), words)
        if any(_name(line) == "torch" for line in requirements):
            _install_torch(lock)
        chosen = ["--constraint", str(lock), *requirements]
    subprocess.run([*PIP, "install", "--no-warn-script-location", *chosen], check=True)
    strangers = _installed() - _locked(lock) - _OF_THE_ENVIRONMENT
    if strangers:
        print(
            f"not in {lock}: {', '.join(sorted(strangers))}; add them, with their versions", file=sys.stderr
        )
    return 1 if strangers else 0


def _requirements(project: Path, extras: list[str]) -> list[str]:
    tables = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    optional = tables["optional-dependencies"]
    return [*tables["dependencies"], *(line for extra in extras for line in optional[extra])]


def _install_torch(lock: Path) -> None:
    """Installs torch without its dependencies, which TORCH_INDEX may have in other versions."""
    (pin,) = (line for line in lock.read_text(encoding="utf-8").splitlines() if _name(line) == "torch")
    command = [*PIP, "install", "--no-warn-script-location", "--no-deps", pin]
    if subprocess.run(command, check=False).returncode != 0:
        subprocess.run([*command, "--index-url", os.environ["TORCH_INDEX"]], check=True)


def _installed() -> set[str]:
    listing = subprocess.run([*PIP, "list", "--format=freeze"], check=True, capture_output=True, text=True)
    return {_name(line) for line in listing.stdout.splitlines()}


def _locked(lock: Path) -> set[str]:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return {_name(line) for line in lines if line and not line.startswith(("#", "-"))}


def _name(line: str) -> str:
    """Returns the distribution's name in normalized form."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=@<> \[]", line)[0]).lower()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
