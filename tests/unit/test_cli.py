"""The command line: what it prints, what it refuses and with which code; nothing is started that trains."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from rich.console import Console

from paceline.cli.commands import doctor
from paceline.cli.commands.check import quick_check
from paceline.cli.launch import dry_run, plan
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.plan import Machine
from paceline.cli.live.follow import RunEnd, follow
from paceline.cli.live.table import LiveView
from paceline.cli.live.view import PlainView, numbers, step_line
from paceline.cli.main import main
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, DataError, EnvironmentLackError, ModelError, PeerLostError
from paceline.rpc.v1 import controller_pb2 as pb
from support.fake_controller import FakeController, end_event, serve, step_event

METRICS = {
    "critic/score/mean": 0.5,
    "val/reward/mean": 0.625,
    "algorithm/reference_kl": 0.01234,
    "actor/ppo_kl": 0.5,
    "actor/pg_clipfrac": 0.03,
    "actor/entropy": 1.25,
    "perf/tokens_per_s": 5200.4,
    "timing_s/gen": 1.5,
    "timing_s/reward": 0.1,
    "timing_s/learn": 2.0,
    "timing_s/update_actor": 1.1,
    "timing_s/update_weights": 0.05,
    "timing_s/step": 3.7,
    "barrier/wait_s": 0.9,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data, a model folder without a tokenizer, and a configuration."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i} + 1 =", "ground_truth": str(i + 1)} for i in range(80)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(
            {
                "max_position_embeddings": 64,
                "num_attention_heads": 6,
                "architectures": ["Tiny"],
                "eos_token_id": 1,
            }
        )
    )
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "data": {"train_files": "train.parquet", "max_prompt_length": 32, "max_response_length": 8},
                "model": {"path": "model"},
                "reward": {"functions": [{"name": "exact_match"}]},
                "trainer": {"total_steps": 2},
                "learner": {"device": "cpu"},
            }
        )
    )
    return tmp_path


def config(**sections: object) -> RunConfig:
    tree: dict[str, object] = {
        "data": {"train_files": ["train.parquet"]},
        "model": {"path": "model"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 2},
    }
    return parse(RunConfig, tree | sections)


# --- what the user gave


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


def test_check_names_every_fault_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.val_files=gone.jsonl", "reward.functions=[{name: exact_macth}]"]
    assert main(["check", "run.yaml", *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    configuration: run.yaml"
    assert lines[1] == "ok    model: model: Tiny, up to 64 tokens"
    assert lines[2].startswith("FAULT tokenizer: model folder model has no tokenizer (tokenizer.json)")
    assert lines[3] == "-     training prompts: not looked at, as the model is at fault"
    assert lines[4].startswith("FAULT validation prompts: data file gone.jsonl does not exist")
    assert lines[5].startswith("FAULT reward: there is no built-in reward function 'exact_macth'")
    assert lines[-1] == "3 fault(s); nothing was started"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.max_prompt_length=60", "exceed the model's max_position_embeddings=64"),
        ("rollout.tensor_model_parallel_size=4", "must divide the model's 6 attention heads"),
        ("data.prompt_key=question", "has no column 'question'; it has prompt, ground_truth"),
    ],
)
def test_check_looks_into_model_and_data(
    project: Path, capsys: pytest.CaptureFixture[str], override: str, sentence: str
) -> None:
    assert main(["check", "run.yaml", override]) == 2
    assert sentence in capsys.readouterr().out


def test_a_model_folder_without_weights(project: Path) -> None:
    (project / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights \(\*.safetensors\)"):
        quick_check(config())
    quick_check(config(model={"path": "model", "load_format": "random"}))


def test_an_empty_data_set(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "empty.jsonl").write_text("")
    assert main(["check", "run.yaml", "data.train_files=empty.jsonl"]) == 2
    assert "no rows in empty.jsonl" in capsys.readouterr().out
    with pytest.raises(DataError, match="does not exist"):
        quick_check(config(data={"train_files": ["gone.parquet"]}))


# --- who gets what


def test_a_cpu_run_shares_the_cores() -> None:
    machine = Machine(num_cores=8, gpus=())
    told = config(
        learner={"world_size": 2}, rollout={"replicas": 2}, actor={"ppo_max_token_len_per_gpu": 2048}
    )
    specs = {s.name: s for s in plan.members(told, machine, controller_address="h:1", master_port=29)}
    assert list(specs) == ["rollout-0", "rollout-1", "learner-0", "learner-1", "reward"]
    assert specs["learner-1"].env["OMP_NUM_THREADS"] == "4"
    ranks = {k: specs["learner-1"].env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    assert ranks == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29"}
    assert "CUDA_VISIBLE_DEVICES" not in specs["rollout-0"].env
    assert specs["rollout-1"].command[3:] == (
        "--controller", "h:1", "--member-id", "rollout-1", "--host", "127.0.0.1",
    )  # fmt: skip


def test_gpus_go_to_the_learner_first_and_the_rest_to_the_engines_in_order() -> None:
    machine = Machine(num_cores=32, gpus=tuple(range(8)))
    told = config(learner={"world_size": 4}, rollout={"replicas": 2, "tensor_model_parallel_size": 2})
    specs = {s.name: s for s in plan.members(told, machine, controller_address="h:1", master_port=29)}
    devices = {name: spec.env.get("CUDA_VISIBLE_DEVICES") for name, spec in specs.items()}
    assert devices == {
        "rollout-0": "4,5",
        "rollout-1": "6,7",
        "learner-0": "0,1,2,3",
        "learner-1": "0,1,2,3",
        "learner-2": "0,1,2,3",
        "learner-3": "0,1,2,3",
        "reward": None,
    }


def test_too_few_gpus_are_told_with_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"need 2 GPUs, 1 are left beside the learner's \(0\)"):
        plan.share_gpus(config(rollout={"replicas": 2}), (0, 1))
    with pytest.raises(ConfigError, match="learner.world_size=2 needs as many GPUs, there are 1"):
        plan.share_gpus(config(learner={"world_size": 2, "devices": [3]}), (0, 1, 2, 3))


def test_a_dry_run_shows_each_service_its_sections_and_no_secret() -> None:
    text = dry_run.describe(
        config(broker={"url": "redis://:hunter2@10.0.0.1:6379/0"}), Machine(num_cores=2, gpus=())
    )
    assert "hunter2" not in text
    assert "redis://***@10.0.0.1:6379/0" in text
    for service in ("controller", "rollout-0", "learner-0", "reward"):
        assert f"== {service}\n" in text
    reward = yaml.safe_load(text.rpartition("== reward")[2].split("\n", 3)[3])
    assert sorted(reward) == ["broker", "model", "reward", "service", "telemetry"]
    assert set(plan.SECTIONS) == {"controller", "rollout", "learner", "reward"}
    assert {name for names in plan.SECTIONS.values() for name in names} == set(RunConfig.model_fields)


# --- what is wrong with the machine


def test_a_taken_controller_port_is_told_before_anything_is_made(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "run.yaml", f"service.controller_port={port}"]) == 2
    err = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is taken" in err
    assert "set service.controller_port to another port" in err
    assert not (project / "runs").exists()


def test_what_the_controller_dies_of_at_start_is_the_commands_last_line(project: Path) -> None:
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


# --- status


async def test_status_asks_the_controller_of_the_note(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await serve(FakeController(), token="secret")
    resolved, folder = run_dirs.prepare(config(trainer={"total_steps": 2, "run_dir": "runs/mine"}))
    note = run_dirs.new_note(folder, "secret")
    note.controller, note.state = server.address, "running"
    run_dirs.write_note(folder, note)
    for words in (["status"], ["status", "mine"], ["status", "runs/mine"]):
        assert await asyncio.to_thread(main, words) == 0
        assert "step 3/9: collect" in capsys.readouterr().out
    with pytest.raises(EnvironmentLackError, match="belongs to a run that is under way"):
        run_dirs.prepare(resolved)
    run_dirs.end_note(folder, note, "2 steps done")
    assert await asyncio.to_thread(main, ["status"]) == 1
    assert "not running (2 steps done)" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["status", "other"]) == 2
    assert "no run other" in capsys.readouterr().err
    await server.stop(0)


# --- what people see


def test_a_step_in_one_line() -> None:
    assert step_line(3, 9, METRICS) == (
        "step 3/9  reward 0.500  val 0.625  kl 0.0123  clip 0.030  entropy 1.250  tokens/s 5,200  gen 1.50 s  "
        "score 0.10 s  learn 2.00 s  push 0.05 s  step 3.70 s  wait 0.90 s"
    )
    assert step_line(0, 9, {"val/reward/mean": 0.31}) == "step 0/9  val 0.310"


def test_kl_is_the_one_to_the_reference_where_there_is_one() -> None:
    assert numbers(METRICS).kl == 0.01234
    assert numbers({"actor/ppo_kl": 0.5}).kl == 0.5
    assert numbers({"timing_s/update_actor": 1.0, "timing_s/adv": 0.5}).learn_s == 1.5


def test_plain_lines_break_a_long_silence() -> None:
    out = io.StringIO()
    view = PlainView(9, out=out, quiet_s=0.05)
    view.pulse()
    view.phase(step=0, phase="waiting for the learner", admitted=0, wanted=0)
    time.sleep(0.06)
    view.pulse()
    view.step(0, {"weights/pause_ms": 3.0})
    view.phase(step=1, phase="collect", admitted=3, wanted=64)
    view.notice("rollout-1 is gone")
    view.pulse()
    assert out.getvalue().splitlines() == [
        "step 0/9: waiting for the learner, 0 s so far",
        "note: rollout-1 is gone",
    ]


def test_the_live_table_shows_phases_rows_and_notices() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, legacy_windows=False, color_system=None)
    view = LiveView("paceline demo", 9, console=console)
    view.milestone("the controller answers")
    view.phase(step=1, phase="collect", admitted=40, wanted=64)
    text = render(view)
    assert "the controller answers" in text
    assert "step 1/9  collect 40/64" in text
    view.step(1, METRICS)
    view.notice("rollout-1 is gone")
    text = render(view)
    header, row = (line.split() for line in text.splitlines()[1:3])
    assert header[:6] == ["step", "reward", "val", "KL", "clip", "entropy"]
    assert row == [
        "1/9",
        "0.500",
        "0.625",
        "0.0123",
        "0.030",
        "1.250",
        "5,200",
        "1.50",
        "0.10",
        "2.00",
        "0.05",
        "3.70",
        "0.90",
    ]
    assert "note: rollout-1 is gone" in text
    view.close()
    assert "collect" not in render(view), "the status line goes with the end"


def render(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    with console.capture() as captured:
        console.print(view._draw())
    return captured.get()


class Recorder:
    """A view that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.news = asyncio.Event()

    def milestone(self, text: str) -> None:
        self.told.append(text)

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        self.told.append(f"{phase} {admitted}/{wanted}")

    def step(self, step: int, metrics: object) -> None:
        self.told.append(f"step {step}")
        self.news.set()

    def notice(self, text: str) -> None:
        self.told.append(text)

    def close(self) -> None:
        self.told.append("close")


async def test_following_goes_on_over_a_restart_of_the_stream() -> None:
    fake = FakeController()
    phase = pb.WatchEvent(phase=pb.PhaseEvent(step=1, phase="collect", admitted=1, wanted=4))
    fake.script, fake.end_after_stop = [phase, step_event(1)], False
    server = await serve(fake, token="t")
    view = Recorder()
    following = asyncio.create_task(follow(server.address, "t", view))
    await asyncio.wait_for(view.news.wait(), 10)
    # The stream was cut after step 1; the next one begins where it ended.
    fake.script = [
        step_event(2),
        pb.WatchEvent(notice=pb.NoticeEvent(message="n")),
        end_event(ok=True, message="done"),
    ]
    assert await following == RunEnd(ok=True, message="done")
    assert view.told == ["collect 1/4", "step 1", "step 2", "n"]
    await server.stop(0)


async def test_following_a_controller_that_is_gone_ends() -> None:
    server = await serve(FakeController())
    await server.stop(0)
    with pytest.raises(PeerLostError):
        await follow(server.address, "", Recorder(), patience_s=0.2)


# --- the others


def test_doctor_says_what_is_lacking_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks() -> str:
        raise EnvironmentLackError("no Redis server on this machine. Three ways to have one: ...")

    monkeypatch.setattr("paceline.broker.redis_server.find_server", lacks)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    findings = {one.name: one for one in doctor.examine()}
    assert findings["Python"].verdict == "ok"
    assert (findings["Redis server"].verdict, findings["vLLM"].verdict) == ("lacks", "lacks")
    assert "Three ways" in findings["Redis server"].hint
    assert main(["doctor"]) == 1
    assert "lacking: torch, vLLM, transformers" in capsys.readouterr().out


def test_reward_scores_one_response(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.py").write_text(
        "def half(response, ground_truth, *, scale=1.0):\n    return 0.5 * scale\n"
    )
    assert main(["reward", "exact_match", "72", "72"]) == 0
    assert main(["reward", "mine.py:half", "x", "y", "scale=4"]) == 0
    assert capsys.readouterr().out.split() == ["1.0", "2.0"]
    assert main(["reward", "mine.py:whole", "x", "y"]) == 2
    assert "has no 'whole'" in capsys.readouterr().err


def test_export_knows_which_steps_are_complete(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, complete in ((10, True), (20, True), (30, False)):
        folder = project / "runs" / "mine" / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "manifest.json").write_text("{}")
    assert main(["export", "mine", "30", "out"]) == 1
    assert "no complete checkpoint of step 30; it has: 10, 20" in capsys.readouterr().err
    (project / "out").mkdir()
    (project / "out" / "x").touch()
    assert main(["export", "mine", "20", "out"]) == 1
    assert "out is not empty" in capsys.readouterr().err


def test_sft_says_what_is_missing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {
        "sft": {"train_files": "pairs.parquet", "output": "out", "steps": 3},
        "model": {"path": "model"},
        "data": {},
    }
    (project / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert main(["sft", "sft.yaml"]) == 2
    assert "data file pairs.parquet does not exist; correct sft.train_files" in capsys.readouterr().err
    assert main(["sft", "sft.yaml", "--dry-run", "sft.steps=4"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["sft"]["steps"] == 4


@pytest.mark.parametrize(
    "command", ["train", "check", "doctor", "status", "sft", "export", "report", "reward"]
)
def test_every_command_has_help_and_loads_no_torch(command: str) -> None:
    program = (
        "import sys\nfrom paceline.cli.main import main\n"
        f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'vllm', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: paceline {command}")
