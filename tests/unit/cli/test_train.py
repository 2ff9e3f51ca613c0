"""`paceline train`: what it refuses, with which sentence and code; nothing is started that trains."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.main import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml"], "cannot read configuration none.yaml"),
        (["run.yaml", "trainer.totl_steps=3"], "unknown key trainer.totl_steps; did you mean 'total_steps'?"),
        (["run.yaml", "trainer.total_steps=many"], "trainer.total_steps='many'"),
        (["run.yaml", "trainer.total_steps"], "must look like dotted.key=value"),
        (["run.yaml", "data.train_files=gone.parquet"], "data file gone.parquet does not exist"),
        (["run.yaml", "model.path=gone"], "model folder gone does not exist"),
    ],
)
def test_train_refuses_in_one_sentence(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("paceline train: ")
    assert sentence in err
    assert "\n" not in err
    assert not (project / "runs").exists(), "nothing is made for a run that cannot start"


def test_overrides_may_stand_on_both_sides_of_options(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", "trainer.seed=7", "--dry-run", "trainer.total_steps=9"]) == 0
    out = capsys.readouterr().out
    assert "total_steps: 9" in out
    assert "seed: 7" in out
    assert not (project / "runs").exists()


def test_a_taken_controller_port_is_refused_before_anything_is_made(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "run.yaml", f"service.controller_port={port}"]) == 2
    err = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is taken" in err
    assert "set service.controller_port to another port" in err
    assert not (project / "runs").exists()


def test_the_controllers_error_at_start_is_the_commands_last_line(project: Path) -> None:
    words = ["run.yaml", "trainer.run_dir=r", "broker.url=redis://127.0.0.1:1/0"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "train", *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("paceline train: model folder model has no tokenizer")
    note = run_dirs.read_note(project / "r")
    assert note is not None
    assert note.state == "ended"
