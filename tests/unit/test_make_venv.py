"""`make venv`: what it says when something is lacking, and that the next try works."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support import source

# A Python that notes its arguments. What LACKS names fails; -m venv copies it as the environment's own.
PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *libnuma*) case "$LACKS" in *libnuma*) exit 1;; esac ;;
  *ensurepip*) case "$LACKS" in *ensurepip*) exit 1;; esac; touch "$CALLS.pip" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip --version") test -e "$CALLS.pip" ;;
  *--index-url*torch==*) case "$LACKS" in *mirror*) exit 1;; esac ;;
  *torch==*) case "$LACKS" in *torch*) echo "ERROR: No matching distribution" >&2; exit 1;; esac ;;
esac
"""


def make(
    folder: Path, *variables: str, lacks: str = "", tools: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """With programs from `tools`, `make` chooses the build itself."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = os.pathsep.join([*([str(tools)] if tools else []), os.environ["PATH"]])
    environ = {"PATH": path, "CALLS": str(folder / "calls"), "LACKS": lacks}
    build = [] if tools else ["BUILD=cpu"]
    command = ["make", "venv", f"VENV={folder}/venv", f"PYTHON={python}", *build, *variables]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environ, cwd=source.ROOT, check=False
    )


def calls(folder: Path) -> list[str]:
    lines = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return [" ".join(line.replace("--disable-pip-version-check", "").split()) for line in lines]


def test_without_a_supported_python_it_names_the_packages_of_debian_and_ubuntu(tmp_path: Path) -> None:
    done = make(tmp_path, "PYTHON=")
    assert done.returncode == 2
    assert "needs Python 3.11 or 3.12, but neither is on the PATH" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_a_python_that_cannot_make_environments_leaves_none_behind(tmp_path: Path) -> None:
    done = make(tmp_path, lacks="ensurepip")
    assert done.returncode == 2
    assert "apt-get install python3-venv; then the same command again" in done.stderr
    assert calls(tmp_path) == ["-c import ensurepip"]
    assert not (tmp_path / "venv").exists()
    assert make(tmp_path).returncode == 0


def test_a_machine_without_libnuma_hears_of_it_before_anything_is_downloaded(tmp_path: Path) -> None:
    done = make(tmp_path, lacks="libnuma")
    assert done.returncode == 2
    assert "On Debian or Ubuntu: apt-get install libnuma1" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_without_pip_gets_it(tmp_path: Path) -> None:
    """Such an environment is left by a `venv` without ensurepip, and made by `uv venv`."""
    assert make(tmp_path).returncode == 0
    (tmp_path / "venv" / ".installed").unlink()
    (tmp_path / "calls.pip").unlink()
    calls(tmp_path)
    assert make(tmp_path).returncode == 0
    assert calls(tmp_path)[1:3] == ["-m pip --version", "-m ensurepip --default-pip"]
    (tmp_path / "venv" / ".installed").unlink()
    (tmp_path / "calls.pip").unlink()
    done = make(tmp_path, lacks="ensurepip")
    assert done.returncode == 2
    assert f"run: rm -r {tmp_path}/venv" in done.stderr


@pytest.mark.parametrize("lacks", ["", "torch"])
def test_torch_comes_from_pips_index_or_its_own_without_an_error_before_it(
    tmp_path: Path, lacks: str
) -> None:
    done = make(tmp_path, "TORCH=torch==1", "TORCH_INDEX=https://builds.example/cpu", lacks=lacks)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stdout + done.stderr
    second = ["-m pip install --index-url https://builds.example/cpu torch==1"] if lacks else []
    assert calls(tmp_path)[4:] == [
        "-m pip install torch==1",  # and what it asks for
        *second,
        f"-m pip install --no-deps --quiet -r {tmp_path}/venv/requirements.txt -r requirements/dev.txt",
        "-m pip install --no-deps --quiet --no-build-isolation -e .",
    ]
    assert "nothing to be done" in make(tmp_path).stdout.lower()


def test_a_torch_that_is_named_takes_the_place_of_the_lock_files(tmp_path: Path) -> None:
    """The lock file asks for a build that is on torch's own index alone; a mirror may have another."""
    lock = (source.ROOT / "requirements" / "cpu.txt").read_text().splitlines(keepends=True)
    (torch,) = (line for line in lock if line.startswith("torch=="))
    assert make(tmp_path).returncode == 0
    first = calls(tmp_path)
    assert f"-m pip install --no-deps {torch.strip()}" in first
    assert "-m pip install --no-deps --quiet -r requirements/cpu.txt -r requirements/dev.txt" in first
    (tmp_path / "venv" / ".installed").unlink()
    assert make(tmp_path, "TORCH=torch==1").returncode == 0
    (installed,) = (line for line in calls(tmp_path) if line.endswith(" -r requirements/dev.txt"))
    lock.remove(torch)
    assert (tmp_path / "venv" / "requirements.txt").read_text() == "".join(lock)
    files = f"-r {tmp_path}/venv/requirements.txt -r requirements/dev.txt"
    assert installed == f"-m pip install --no-deps --quiet {files}"


def test_torch_that_is_nowhere_says_how_to_name_a_mirror(tmp_path: Path) -> None:
    done = make(tmp_path, "TORCH=torch==1", "TORCH_INDEX=https://builds.example/cpu", lacks="torch mirror")
    assert done.returncode == 2
    assert "torch==1 was found neither on pip's index nor at https://builds.example/cpu" in done.stderr
    assert "TORCH_INDEX=ADDRESS" in done.stderr
    assert "larger build" not in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()
    done = make(tmp_path, "TORCH=torch==1.2.3+cpu", lacks="torch mirror")
    assert "; or TORCH=torch==1.2.3 for the larger build of pip's index" in done.stderr


@pytest.mark.parametrize(
    ("smi", "file", "words"),
    [("exit 0", "cuda", "Installing for NVIDIA GPUs"), ("exit 9", "cpu", "Installing for CPUs")],
)
def test_the_builds_are_those_for_what_the_machine_has_and_stay_what_they_are(
    tmp_path: Path, smi: str, file: str, words: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (tools / "nvidia-smi").chmod(0o755)
    done = make(tmp_path, "TORCH_INDEX=https://builds.example", tools=tools)
    assert words in done.stdout, done.stderr
    assert any(f"-r requirements/{file}.txt" in line for line in calls(tmp_path))
    assert (tmp_path / "venv" / ".build").read_text().strip() == file
    (tmp_path / "venv" / ".installed").unlink()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    assert words in make(tmp_path, "TORCH_INDEX=https://builds.example", tools=tools).stdout
