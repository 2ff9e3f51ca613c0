"""The small commands (reward, export, sft), and what all commands share."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.checks.environment import Finding, Status
from paceline.cli.main import COMMANDS, main
from paceline.config.load import dump_yaml
from paceline.launch.processes import ranks
from paceline.storage.folder import Folder
from support.cli_configs import config


def test_reward_scores_one_response(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.py").write_text(
        "def half(response, ground_truth, *, scale=1.0):\n    return 0.5 * scale\n"
    )
    assert main(["reward", "exact_match", "72", "72"]) == 0
    assert main(["reward", "mine.py:half", "x", "y", "scale=4"]) == 0
    assert capsys.readouterr().out.split() == ["1.0", "2.0"]
    assert main(["reward", "mine.py:whole", "x", "y"]) == 2
    assert "has no 'whole'" in capsys.readouterr().err


def test_reward_refuses_what_a_run_would_refuse(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "mine.py").write_text(
        "import time\n"
        "def nan(response, ground_truth):\n    return float('nan')\n"
        "def flag(response, ground_truth):\n    return True\n"
        "def hangs(response, ground_truth):\n    time.sleep(3600)\n"
    )
    (project / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    for reference, words in (
        ("mine.py:nan", "not_finite: nan returned nan"),
        ("mine.py:flag", "wrong_type: flag returned bool: return a float"),
        ("mine.py:hangs", "timeout: not scored within 0.5 s"),
        ("slow.py:f", "no answer from a reward process that imports slow.py:f within 1 s"),
    ):
        monkeypatch.setattr(
            "paceline.cli.commands.prepare.reward._IMPORT_S", 1.0 if "slow" in reference else 60.0
        )
        timeout_s = "0.5" if "hangs" in reference else "60"
        assert main(["reward", "--timeout", timeout_s, reference, "x", "y"]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err


def test_reward_scores_the_samples_of_a_prompt_together(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "mine.py").write_text(
        "def rank(items, *, factor=1.0):\n"
        "    lengths = sorted(len(item.response) for item in items)\n"
        "    return [factor * lengths.index(len(item.response)) for item in items]\n"
        "def fields(items):\n"
        "    return [{'score': len(item.prompt), 'level': item.extra['level'],\n"
        "             'gsm8k': float(item.data_source == 'gsm8k')} for item in items]\n"
        "def nan(items):\n"
        "    return [float('nan') if item.response == 'nan' else 1.0 for item in items]\n"
        "def short(items):\n"
        "    return [1.0]\n"
    )
    others = ["--group", "--sample", "xx", "--sample", "x"]
    assert main(["reward", "mine.py:rank", "xxx", "", "factor=0.5", *others]) == 0
    assert main(["reward", "mine.py:rank", "xxx", "", "--group"]) == 0
    assert capsys.readouterr().out.split() == ["1.0", "0.5", "0.0", "0.0"]
    columns = ["--column", "prompt=Q: 1", "--column", "level=3", "--column", "data_source=gsm8k"]
    assert main(["reward", "mine.py:fields", "x", "", "--group", *columns]) == 0
    assert capsys.readouterr().out == "{'fields': 4.0, 'fields/level': 3.0, 'fields/gsm8k': 1.0}\n"

    assert main(["reward", "mine.py:nan", "nan", "", *others]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["not_finite: nan returned nan", "1.0", "1.0"]
    assert "1 of 3 samples have no reward" in captured.err
    for words, code, sentence in (
        (["mine.py:short", "x", "", *others], 1, "wrong_count: short returned 1 values for 3 items"),
        (["mine.py:rank", "x", "", *others, "facto=2"], 2, "has no argument 'facto'; it has factor"),
        (["mine.py:rank", "x", ""], 2, "(paceline reward: --group) for a function of all samples"),
        (["mine.py:rank", "x", "", "--sample", "y"], 2, "add --group"),
        (["gsm8k", "x", "", "--group"], 2, "scores single responses: remove group: true"),
    ):
        assert main(["reward", *words]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert sentence in captured.err


def test_reward_gives_a_function_the_columns_of_its_row(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "mine.py").write_text(
        "def f(response, ground_truth, *, prompt, level):\n    return len(prompt) + 10 * level\n"
    )
    columns = ["--column", "prompt=Q: 1", "--column", "level=3"]
    assert main(["reward", "mine.py:f", "x", "y", *columns]) == 0
    assert capsys.readouterr().out == "34.0\n"
    assert main(["reward", "mine.py:f", "x", "y", "--column", "level"]) == 2
    assert "'level' must look like key=value" in capsys.readouterr().err


def test_hints_keep_their_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(
        part="vLLM", status=Status.LACKING, state="missing [/x]", hint="pip install paceline[gpu]"
    )
    monkeypatch.setattr("paceline.cli.commands.prepare.doctor.examine", lambda: [finding])
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 1
    assert "missing [/x]  pip install paceline[gpu]" in capsys.readouterr().out


def test_doctor_breaks_long_words_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, setting = f"/{'A' * 60}/redis-server", f"sysctl kernel.{'B' * 60}=1"
    finding = Finding(part="Redis server", status=Status.OK, state=path, hint=setting)
    monkeypatch.setattr("paceline.cli.commands.prepare.doctor.examine", lambda: [finding])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert (printed.count("A"), printed.count("B")) == (60, 60)


@pytest.mark.parametrize("url", [None, "elsewhere"])
def test_export_knows_which_steps_are_complete(
    project: Path, capsys: pytest.CaptureFixture[str], url: str | None
) -> None:
    run_dir = project / "runs" / "mine"
    run_dir.mkdir(parents=True)
    trainer = {"total_steps": 2, "checkpoint_url": url and str(project / url)}
    dump = dump_yaml(config(trainer=trainer))
    (run_dir / "config.resolved.yaml").write_text(dump)
    (run_dir / "run.id").write_text("mine-1")
    checkpoints = project / url / "mine-1" if url else run_dir / "checkpoints"
    for step, complete in ((10, True), (20, True), (30, False)):
        folder = checkpoints / f"step_{step:06d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "manifest.json").write_text("{}")
    assert main(["export", "mine", "30", "out"]) == 1
    assert "no complete checkpoint of step 30; it has: 10, 20" in capsys.readouterr().err
    (project / "out").mkdir()
    (project / "out" / "x").touch()
    assert main(["export", "mine", "20", "out"]) == 1
    assert "out is not empty" in capsys.readouterr().err


def test_export_says_why_it_cannot_read_the_checkpoints(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "runs" / "mine").mkdir(parents=True)
    (project / "runs" / "mine" / "config.resolved.yaml").write_text(dump_yaml(config()))

    def refuse(folder: Folder) -> list[str]:
        raise OSError(errno.EIO, "NoCredentialsError: Unable to locate credentials")

    monkeypatch.setattr(Folder, "folders", refuse)
    assert main(["export", "mine", "latest", "out"]) == 1
    assert "cannot be read: NoCredentialsError: Unable to locate" in capsys.readouterr().err


def test_sft_says_what_is_missing_and_what_it_starts(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {
        "sft": {"train_files": "pairs.parquet", "output": "out", "steps": 3},
        "model": {"path": "model"},
        "data": {},
    }
    (project / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert main(["sft", "sft.yaml"]) == 2
    assert "data file pairs.parquet does not exist; correct sft.train_files" in capsys.readouterr().err
    demo = "sft.train_files=examples/arithmetic/data/sft.parquet"
    assert main(["sft", "sft.yaml", demo]) == 2
    assert (
        "sft.parquet does not exist; `python examples/arithmetic/prepare.py` makes it"
        in capsys.readouterr().err
    )
    (project / "pairs.parquet").touch()
    monkeypatch.setattr("paceline.launch.supervised.run_ranks", lambda *args, **options: print("ranks ran"))
    assert main(["sft", "sft.yaml"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "starting 1 rank(s); logs in out.logs", "ranks ran", "model: out"
    ]  # fmt: skip
    assert main(["sft", "sft.yaml", "--dry-run", "sft.steps=4"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["sft"]["steps"] == 4


@pytest.mark.parametrize(
    ("command", "file", "said"),
    [
        ("sft", "run.yaml", "run.yaml is a configuration of `paceline train`: run `paceline train run.yaml`"),
        ("train", "sft.yaml", "sft.yaml is a configuration of `paceline sft`: run `paceline sft sft.yaml`"),
        (
            "check",
            "hosts.yaml",
            "hosts.yaml is a configuration of `paceline up`: run `paceline up hosts.yaml`",
        ),
        ("up", "run.yaml", "run.yaml is a configuration of `paceline train`: run `paceline train run.yaml`"),
    ],
)
def test_a_file_of_another_command_names_that_command(
    project: Path, capsys: pytest.CaptureFixture[str], command: str, file: str, said: str
) -> None:
    (project / "base.yaml").write_text("sft: {train_files: pairs.parquet, output: out, steps: 3}\n")
    (project / "sft.yaml").write_text("extends: base.yaml\nmodel: {path: model}\n")
    (project / "hosts.yaml").write_text("config: run.yaml\nhosts: []\n")
    assert main([command, file]) == 2
    assert capsys.readouterr().err == f"paceline {command}: {said}\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"paceline {importlib.metadata.version('paceline')}\n"


def test_a_source_tree_that_is_not_installed_has_commands_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lacking)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == "paceline from source\n"


# Each command in a fork of an interpreter that has what most of them import; it writes into its own file.
HELP = """
import os, sys
import google.protobuf.json_format, grpc.aio, grpc_health.v1.health, numpy, psutil, redis.asyncio, rich.live
import opentelemetry.sdk.metrics, opentelemetry.sdk.trace, yaml
import paceline.config.run
from paceline.cli.main import COMMANDS, main

for command in COMMANDS:
    if os.fork() == 0:
        os.dup2(os.open(command, os.O_WRONLY | os.O_CREAT), 1)
        try:
            main([command, "--help"])
        except SystemExit as end:
            loaded = {"torch", "vllm", "transformers", "pyarrow"} & set(sys.modules)
            print(f"exit code {end.code}, loaded: {sorted(loaded)}", flush=True)
        os._exit(0)
    os.wait()
"""


def test_every_command_has_help_and_loads_no_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        said = (tmp_path / name).read_text()
        assert said.startswith(f"usage: paceline {name}")
        assert said.endswith("exit code 0, loaded: []\n"), said[-200:]


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for word, meant in (("trian", "did you mean train?"), ("xyz", "`paceline --help` lists them")):
        with pytest.raises(SystemExit) as caught:
            main([word])
        assert caught.value.code == 2
        assert f"{word} is not a command; {meant}" in capsys.readouterr().err


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "  train " in said
    assert "start" in said.partition("  train ")[2].splitlines()[0]


def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the wheel was installed without one of its extras."""
    monkeypatch.setitem(sys.modules, "paceline.cli.commands.results.ui", None)
    with pytest.raises(ModuleNotFoundError):
        main(["ui"])
    monkeypatch.undo()
    (tmp_path / "aiohttp_rest.py").write_text("import a_package_that_nobody_has.web\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        "paceline.cli.commands.results.ui.run", lambda _: importlib.import_module("aiohttp_rest")
    )
    assert main(["ui"]) == 2
    said = capsys.readouterr().err
    assert "paceline ui: the package a_package_that_nobody_has is not installed in this environment" in said


def test_an_example_outside_a_clone_says_where_the_examples_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "examples/arithmetic/ppo.yaml"]) == 2
    said = capsys.readouterr().err
    assert "let `paceline examples` write the examples here" in said
    (tmp_path / "examples").mkdir()
    assert main(["train", "examples/arithmetic/pop.yaml"]) == 2
    said = capsys.readouterr().err
    assert "paceline examples" not in said
    assert "write one with `paceline init FILE.yaml`" in said


def test_ranks_wait_without_taking_cores_and_keep_the_users_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert ranks.thread_variables(None, 2) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    assert ranks.thread_variables(None, 16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert ranks.thread_variables(None, 2) == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"}
    assert ranks.thread_variables(2, 2)["OMP_NUM_THREADS"] == "2"  # sft.threads is asked for


def test_ranks_start_with_these_variables(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("import os, sys; print(*(os.environ.get(n) for n in sys.argv[1:]))")
    names = ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RANK"]
    script = (
        "from pathlib import Path; from paceline.launch.processes.ranks import run_ranks\n"
        f"run_ranks('says', {names}, world_size=1, num_threads=None, log_dir=Path({str(tmp_path)!r}))"
    )
    path = os.pathsep.join((str(tmp_path), *sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "3"}
    env.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "3 passive 0\n"


PRINTS = """
import sys
from paceline.cli.commands.prepare import doctor
from paceline.cli.main import main

def run(_):
    for _ in range({lines}):
        print("x" * 99)
    sys.stdin.read()  # until the reader of the output has ended
    print("y", flush={flush})
    return 3

doctor.run = run
sys.argv = ["paceline", "doctor"]
sys.exit(main())
"""


@pytest.mark.parametrize(("lines", "flush", "code"), [(1, False, 3), (1, True, 141), (99, True, 141)])
def test_a_reader_that_ends_before_the_output_is_no_error(lines: int, flush: bool, code: int) -> None:
    script = PRINTS.format(lines=lines, flush=flush)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", script], text=True, env=environ, **pipes) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate("", timeout=60)
    assert (process.returncode, said) == (code, "")


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("paceline.cli.commands.prepare.doctor.run", run)
    with pytest.raises(BrokenPipeError):
        main(["doctor"])
