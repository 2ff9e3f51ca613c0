"""`paceline train`: what it refuses, with which sentence and code; nothing is started that trains."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline.checks import machine_checks, rollout_checks
from paceline.cli.commands.start import train
from paceline.cli.main import main
from paceline.config.run import RunConfig
from paceline.core.errors import EnvironmentLackError
from paceline.launch.outcome import LaunchOutcome
from paceline.runs import run_dir as run_dirs
from paceline.service.identity.credentials import INSECURE, TLS_DIR
from paceline.show.live.view import Metrics, View
from paceline.sizing.machine import Machine
from support.byte_tokenizer import save_tokenizer
from support.cli_configs import config
from support.forked import run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml"], "cannot read configuration none.yaml"),
        (["run.yaml", "trainer.totl_steps=3"], "unknown key trainer.totl_steps; did you mean 'total_steps'?"),
        (["run.yaml", "trainer.total_steps=many"], "trainer.total_steps='many'"),
        (["run.yaml", "trainer.total_steps"], "must look like dotted.key=value"),
        (["run.yaml", "data.train_files=gone.parquet"], "data file gone.parquet does not exist"),
        (["run.yaml", "model.path=gone"], "model folder gone does not exist; set model.path"),
        (
            ["run.yaml", "model.path=examples/arithmetic/start"],
            "start does not exist; `paceline sft examples/arithmetic/sft.yaml` makes it",
        ),
        (
            ["run.yaml", "data.val_files=examples/arithmetic/data/val.parquet"],
            "val.parquet does not exist; `python examples/arithmetic/prepare.py` makes it",
        ),
        (["run.yaml", "data.max_prompt_length=60"], "exceed the model's max_position_embeddings=64"),
        (
            ["run.yaml", "reward.services=[{name: far, address: '127.0.0.1:1'}]"],
            "nobody answers at reward.services.0.address=127.0.0.1:1, the reward service 'far'",
        ),
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


def test_an_environment_that_nobody_serves_is_named_before_anything_is_created(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_checks, "_PATIENCE_S", 0.0)
    words = ["rollout.environment.address=127.0.0.1:1", "data.prompt_format=chat"]
    assert main(["train", "run.yaml", *words]) == 2
    assert capsys.readouterr().err.strip() == (
        "paceline train: nobody answers at rollout.environment.address=127.0.0.1:1, the environment "
        "(Connection refused); start it (serve_environment) before the run, or correct the address"
    )
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("command", "lacking"), [("train", "CONFIG.yaml"), ("reward", "RESPONSE, GROUND_TRUTH")]
)
def test_what_may_be_left_out_is_not_called_required(
    capsys: pytest.CaptureFixture[str], command: str, lacking: str
) -> None:
    with pytest.raises(SystemExit):
        main([command, *(["gsm8k"] if command == "reward" else [])])
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {lacking}\n")


@pytest.mark.parametrize("command", [("train",), ("check", "--quick")])
def test_too_few_gpus_are_a_fault_before_the_start(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    monkeypatch.setattr(machine_checks.Machine, "here", lambda: Machine(num_cores=2, gpus=(0, 1)))
    assert main([*command, "run.yaml", "learner.device=cuda", "learner.world_size=2"]) == 2
    told = capsys.readouterr()
    assert "need 1 GPUs, 0 are left beside the learner's (0,1)" in told.out + told.err
    assert not (project / "runs").exists()


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
    before = sorted(path.name for path in project.iterdir())
    words = ["run.yaml", "trainer.run_dir=r", "broker.url=redis://127.0.0.1:1/0"]
    done = run(["-m", "paceline.cli.main", "train", *words], timeout=300)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("paceline train: model folder model has no tokenizer")
    assert sorted(path.name for path in project.iterdir()) == before, "nothing is left of it"


def test_a_start_that_fails_gives_an_earlier_run_its_folder_back(project: Path) -> None:
    """The model has no tokenizer, which the controller finds when the folder has been made."""
    earlier = project / "runs" / "run"
    earlier.mkdir(parents=True)
    (earlier / "config.resolved.yaml").write_text("{}")
    (project / "runs" / "other").mkdir()
    (project / "runs" / "latest").symlink_to("other")
    words = ["run.yaml", "trainer.resume=never", "broker.url=redis://127.0.0.1:1/0"]
    done = run(["-m", "paceline.cli.main", "train", *words], timeout=300)
    assert done.returncode == 2
    assert sorted(path.name for path in (project / "runs").iterdir()) == ["latest", "other", "run"]
    assert [path.name for path in earlier.iterdir()] == ["config.resolved.yaml"]
    assert (project / "runs" / "latest").resolve() == project / "runs" / "other"


def test_the_run_is_served_to_browsers_while_it_trains(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    async def launch(made: RunConfig, run_dir: Path, *_: object, **__: object) -> LaunchOutcome:
        address = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", capsys.readouterr().out)
        seen.extend(address)
        with await asyncio.to_thread(urllib.request.urlopen, f"{address[0]}data/runs", timeout=120) as reply:
            seen.append([run["name"] for run in json.load(reply)])
        with await asyncio.to_thread(
            urllib.request.urlopen, f"{address[0]}data/run/now", timeout=120
        ) as reply:
            seen.append(json.load(reply))
        return LaunchOutcome(ok=False, message="the end", exit_code=2, began=False)

    monkeypatch.setattr(train, "launch", launch)
    monkeypatch.setattr(train, "log_to", lambda file: None)
    assert main(["train", "run.yaml", "--ui", "--ui-port", "0"]) == 2
    address, names, now = seen
    assert (names, now) == (["run"], {})
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(address, timeout=120)


def test_steps_on_gpus_are_held_against_what_is_expected_of_them(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Expected:
        def step(self, metrics: Metrics) -> str:
            return f"expected {metrics['timing_s/gen']:g} s"

    async def launch(made: RunConfig, run_dir: Path, view: View, *_: object, **__: object) -> LaunchOutcome:
        view.step(1, {"timing_s/gen": 3.5})
        return LaunchOutcome(ok=False, message="the end", exit_code=2, began=False)

    monkeypatch.setattr(train, "launch", launch)
    monkeypatch.setattr(train, "log_to", lambda file: None)
    monkeypatch.setattr(train.Expectation, "of", lambda config, machine: Expected())
    assert main(["train", "run.yaml"]) == 2
    assert "note: expected 3.5 s" in capsys.readouterr().out


def test_epochs_are_told_as_steps_before_the_run(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunConfig] = []

    async def launch(made: RunConfig, *_: object, **__: object) -> LaunchOutcome:
        seen.append(made)
        return LaunchOutcome(ok=False, message="the end", exit_code=2, began=False)

    monkeypatch.setattr(train, "launch", launch)
    monkeypatch.setattr(train, "log_to", lambda file: None)
    save_tokenizer(project / "model")
    # Of 80 rows, ten are "0 + 1 =" to "9 + 1 =", of 7 bytes; the others are longer.
    words = ["trainer.total_epochs=2.5", "data.train_batch_size=16", "data.max_prompt_length=8"]
    words += ["actor.ppo_mini_batch_size=16", "trainer.total_steps=null"]
    assert main(["train", "run.yaml", *words]) == 2
    assert "13 steps, for trainer.total_epochs=2.5: 80 prompts are 5 steps" in capsys.readouterr().out
    assert seen[0].trainer.num_steps == 13
    assert main(["train", "run.yaml", *words[:-1], "trainer.total_steps=4"]) == 2
    less = ["data.max_prompt_length=7", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]
    assert main(["train", "run.yaml", *words, *less]) == 2
    assert [config.trainer.num_steps for config in seen] == [13, 4, 5]


def test_a_page_for_other_machines_wants_tls_before_anything_is_made(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TLS_DIR, INSECURE):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "run.yaml", "--ui", "--ui-host", "0.0.0.0"]) == 2
    err = capsys.readouterr().err
    assert "refusing to serve runs and their secret address on 0.0.0.0 in plain text" in err
    assert "leave --ui-host out" in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["train", "run.yaml", "--ui", "--ui-port", port]) == 2
    assert "give another --ui-port" in capsys.readouterr().err
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", "model: {run}/model"),
        ("raise SystemExit('error: no policy')", "model: not exported (error: no policy); `paceline export"),
        ("import time; time.sleep(9)", "model: not exported within learner.command_timeout_s=0.2; `paceline"),
    ],
)
def test_the_model_is_written_at_the_end_or_the_reason_why_not(
    project: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(train.run_dirs, "newest_checkpoint", lambda config, run_dir: 7)
    seen: list[list[str]] = []
    really = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        seen.append(command[1:])
        with pytest.raises(EnvironmentLackError, match="is still writing its model; try again when"):
            run_dirs.prepare(again)
        return really([sys.executable, "-c", program], **options)

    again = config(trainer={"total_steps": 9, "run_dir": str(project), "resume": "never"})
    run_dirs.end_note(project, run_dirs.new_note(project, "secret"), "done")
    monkeypatch.setattr(train.subprocess, "run", run)
    limit = 0.2 if "sleep" in program else 20.0
    made = config(learner={"command_timeout_s": limit})
    assert train.export_model(made, project).startswith(said.format(run=project))
    assert seen == [["-m", "paceline.learner.export", str(project), "7", str(project / "model")]]
    assert run_dirs.prepare(again).run_dir == project, "its folder is free again"
