"""`paceline check`: each fault of configuration, model and data, named once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.launch import preflight
from paceline.cli.launch.preflight import quick_check
from paceline.cli.main import main
from paceline.core.errors import DataError, ModelError
from support.cli_configs import config

DATA = {"train_files": ["train.parquet"], "max_prompt_length": 32, "max_response_length": 8}


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's check starts a process that imports torch, which takes seconds."""
    monkeypatch.setattr(preflight, "_learner_check", lambda config, *options: "the line of the learner")


@pytest.mark.usefixtures("without_torch")
def test_check_names_every_fault_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.val_files=gone.jsonl", "reward.functions=[{name: exact_macth}]"]
    assert main(["check", "run.yaml", *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    configuration: run.yaml"
    assert lines[1] == "ok    model: model: Tiny, up to 64 tokens"
    assert lines[2] == "ok    self-test: the line of the learner"
    assert lines[3].startswith("FAULT tokenizer: model folder model has no tokenizer (tokenizer.json)")
    assert lines[4] == "-     training prompts: not checked, as the model has a fault"
    assert lines[5].startswith("FAULT validation prompts: data file gone.jsonl does not exist")
    assert lines[6].startswith("FAULT reward functions: there is no built-in reward function 'exact_macth'")
    assert lines[7] == "ok    episodes: none"
    assert lines[8] == "ok    policy loss: ppo_clip"
    assert lines[9] == "ok    engine: vllm"
    assert lines[10].startswith("ok    devices: CPU, ")
    assert lines[11] == "ok    reward services: none"
    assert lines[12] == "ok    memory: CPU, nothing to plan"
    assert lines[-1] == "3 fault(s); nothing was started"


@pytest.mark.usefixtures("without_torch")
def test_check_plans_the_memory_of_gpus(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_json = project / "model" / "config.json"
    config_json.write_text(json.dumps(json.loads(config_json.read_text()) | {"vocab_size": 1000}))
    words = ["learner.device=cuda", "learner.devices=[0]", "rollout.devices=[1]"]
    monkeypatch.setattr(preflight.Machine, "here", lambda: preflight.Machine(num_cores=2, gpus=(0, 1)))
    monkeypatch.setattr(preflight, "gpu_memory", lambda: {0: 80 << 30, 1: 80 << 30})
    main(["check", "run.yaml", *words])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("ok    memory: the most that each phase takes (an estimate)")
    assert lines[first + 2].startswith("      learner GPU 0, update: ")
    assert lines[first + 4].startswith(
        "      rollout GPU 1, generation: 68.0 GiB = context 1.5 GiB + weights"
    )
    monkeypatch.setattr(preflight, "gpu_memory", lambda: {0: 1 << 30, 1: 80 << 30})
    assert main(["check", "run.yaml", *words]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAULT memory")]
    assert line.startswith("FAULT memory: GPU 0 has 1.0 GiB, the learner's update needs")
    main(["check", "run.yaml", "--elsewhere", "learner.device=auto"])
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
    assert main(["check", "run.yaml"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "self-test" in line]
    assert line.startswith(
        "FAULT self-test: Lfm2ForCausalLM has recurrent or convolution layers (Lfm2ShortConv)"
    )


def test_a_self_test_that_never_ends_is_a_fault(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_LEARNER_CHECK_S", 0.02)
    assert main(["check", "run.yaml"]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "self-test" in line]
    assert line.startswith("FAULT self-test: the self-test gave no answer within 0 s: ")


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
    assert not {"devices:", "services:"} & set(capsys.readouterr().out.split())
