"""Models and data sets by their names on the hub, against a stand-in that speaks its HTTP."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from paceline.cli.commands.results import export
from paceline.cli.main import main
from paceline.config.load import dump_yaml, load, parse
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.core.errors import DataError, ModelError
from paceline.data.hub import local_files, pinned_run, uses_hub
from paceline.launch.planning.dry_run import describe
from paceline.runs import run_dir as run_dirs
from paceline.storage.hub import HubName, is_named
from paceline.storage.models import local_folder, local_model
from support.cli_configs import accept
from support.hub import StandInHub, stand_in_hub

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "onnx/model.onnx": b"again",
}


def _parquet(*answers: str) -> bytes:
    sink = pa.BufferOutputStream()
    rows = [{"question": f"question {answer}", "answer": answer} for answer in answers]
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def _card(configs: list[dict[str, Any]]) -> bytes:
    return f"---\n{yaml.safe_dump({'configs': configs})}---\nA data set.\n".encode()


GSM8K = {
    "README.md": _card(
        [
            {
                "config_name": name,
                "data_files": [
                    {"split": "train", "path": f"{name}/train-*"},
                    {"split": "test", "path": f"{name}/test-*"},
                ],
            }
            for name in ("main", "socratic")
        ]
    ),
    "main/train-00000-of-00002.parquet": _parquet("1"),
    "main/train-00001-of-00002.parquet": _parquet("2"),
    "main/test-00000-of-00001.parquet": _parquet("3"),
    "socratic/train-00000-of-00001.parquet": _parquet("4"),
    "socratic/test-00000-of-00001.parquet": _parquet("5"),
}


def _use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What HF_ENDPOINT does when huggingface_hub is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with stand_in_hub() as server:
        _use(monkeypatch, server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def _config(**sections: Any) -> RunConfig:
    tree = {
        "model": {"path": "acme/tiny"},
        "data": {"train_files": "openai/gsm8k", "val_files": "openai/gsm8k", "prompt_key": "question"},
        "reward": {"functions": [{"name": "gsm8k"}]},
        "trainer": {"total_steps": 1},
    }
    return parse(RunConfig, tree | sections)


def test_what_is_a_name_and_what_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_named("Qwen/Qwen2.5-0.5B-Instruct")
    assert is_named("hf://models/tiny")
    for path in ("models/tiny", "/srv/qwen", "./a/b", "a/b/c", "data.jsonl", "data/x.parquet", "s3://b/m"):
        assert not is_named(path), path
    full = HubName.parse("openai/gsm8k@refs/pr/1:main:test")
    assert full == HubName(repo="openai/gsm8k", revision="refs/pr/1", subset="main", split="test")
    assert str(full) == "hf://openai/gsm8k@refs/pr/1:main:test"


def test_each_service_fetches_what_it_needs(hub: StandInHub) -> None:
    hub.put("acme/tiny", MODEL)
    model = ModelConfig(path="acme/tiny")
    small = Path(local_model(model, "controller").path)
    assert sorted(path.name for path in small.iterdir()) == ["config.json", "tokenizer.json"]
    assert not any(request.endswith("model.safetensors") for request in hub.requests)
    large = Path(local_model(model, "learner").path)
    assert sorted(path.name for path in large.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (large / "model.safetensors").read_bytes() == b"weights"
    assert local_folder("acme/tiny", model) == str(large)


def test_the_cache_serves_a_second_start_and_an_offline_one(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = hub.put("acme/tiny", MODEL)
    model = ModelConfig(path=f"acme/tiny@{commit}")
    first = local_model(model, "learner").path
    hub.requests.clear()
    assert local_model(model, "learner").path == first
    assert not [request for request in hub.requests if "/resolve/" in request]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert local_model(ModelConfig(path="acme/tiny@" + commit), "learner").path == first
    assert hub.requests == []


def test_offline_without_a_copy_says_what_to_do(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.put("acme/tiny", MODEL)
    local_model(ModelConfig(path="acme/tiny"), "controller")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="acme/other is not a folder or file here.*--offline.*start once"):
        local_model(ModelConfig(path="acme/other"), "controller")
    with pytest.raises(ModelError, match=r"is not in huggingface_hub's cache, or only in part"):
        local_model(ModelConfig(path="acme/tiny"), "learner")  # the cache has no weights


def test_no_network_names_the_hub(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    _use(monkeypatch, f"http://127.0.0.1:{port}")
    with pytest.raises(ModelError, match=rf"http://127.0.0.1:{port} cannot be reached.*HF_ENDPOINT"):
        local_model(ModelConfig(path="acme/tiny"), "controller")


def test_faults_of_the_name_are_told_apart(hub: StandInHub) -> None:
    hub.put("acme/tiny", MODEL)
    hub.put("acme/secret", MODEL)
    hub.put("acme/bin", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.gated.add("acme/secret")
    for path, words in {
        "acme/absent": "no model of this name",
        "acme/tiny@v9": "no revision v9",
        "acme/secret": "set HF_TOKEN",
        "acme/bin": "no weights as safetensors",
    }.items():
        with pytest.raises(ModelError, match=words):
            local_model(ModelConfig(path=path), "learner")


def test_a_configuration_for_names_of_the_hub(hub: StandInHub, tmp_path: Path) -> None:
    hub.put("openai/gsm8k", GSM8K, kind="datasets")
    hub.put("acme/tiny", {**MODEL, "chat_template.jinja": b"x"})
    file = tmp_path / "run.yaml"
    words = ["--model", "acme/tiny", "--data", "openai/gsm8k", "--reward", "gsm8k"]
    assert main(["init", str(file), *words]) == 0
    data = load(RunConfig, file).data
    assert data.train_files == ("openai/gsm8k",)
    assert (data.prompt_key, data.ground_truth_key) == ("question", "answer")


def test_gsm8k_by_its_name(hub: StandInHub) -> None:
    hub.put("openai/gsm8k", GSM8K, kind="datasets")
    earlier = GSM8K | {"main/test-00000-of-00001.parquet": _parquet("6")}
    old = hub.put("openai/gsm8k", earlier, kind="datasets")
    hub.put("openai/gsm8k", GSM8K, kind="datasets")

    def answers(name: str, split: str) -> list[str]:
        files = local_files([name], split)
        return [row["answer"] for file in files for row in pq.read_table(file).to_pylist()]

    assert answers("openai/gsm8k", "train") == ["1", "2"]
    assert answers("openai/gsm8k", "val") == ["3"]
    assert answers(f"openai/gsm8k@{old}", "val") == ["6"]
    assert answers("openai/gsm8k:socratic", "train") == ["4"]
    assert answers("openai/gsm8k:main:test", "train") == ["3"]
    with pytest.raises(DataError, match=r"no split dev; .* has test, train"):
        answers("openai/gsm8k:main:dev", "val")
    with pytest.raises(DataError, match="configurations main, socratic"):
        answers("openai/gsm8k:other", "train")


def test_a_data_set_without_a_card_is_known_by_its_file_names(hub: StandInHub) -> None:
    files = {"data/train-00000.parquet": _parquet("1"), "data/test.jsonl": b"{}"}
    hub.put("acme/plain", files, kind="datasets")
    assert [file.name for file in local_files(["acme/plain"], "train")] == ["train-00000.parquet"]
    assert [file.name for file in local_files(["acme/plain"], "val")] == ["test.jsonl"]


def test_a_data_set_of_another_format_is_taken_as_the_hub_converts_it(hub: StandInHub) -> None:
    hub.put("acme/csv", {"train.csv": b"a,b"}, kind="datasets")
    with pytest.raises(DataError, match="no parquet or JSONL files of a split train"):
        local_files(["acme/csv"], "train")
    converted = {"default/train/0000.parquet": _parquet("1")}
    hub.put("acme/csv", converted, kind="datasets", revision="refs/convert/parquet")
    (file,) = local_files(["acme/csv"], "train")
    assert pq.read_table(file).to_pylist()[0]["answer"] == "1"


def test_a_run_keeps_its_commits_when_the_branch_moves(hub: StandInHub) -> None:
    commit, data = hub.put("acme/tiny", MODEL), hub.put("openai/gsm8k", GSM8K, kind="datasets")
    sets = {"socratic": "openai/gsm8k:socratic:test"}
    prepared = run_dirs.prepare(_config(data={"train_files": "openai/gsm8k", "val_sets": sets}))
    assert prepared.config.model.path == f"hf://acme/tiny@{commit}"
    assert prepared.config.data.train_files == (f"hf://openai/gsm8k@{data}",)
    assert prepared.config.data.val_sets["socratic"].files == (f"hf://openai/gsm8k@{data}:socratic:test",)
    accept(prepared.run_dir)
    moved = hub.put("acme/tiny", MODEL | {"model.safetensors": b"newer"})
    again = run_dirs.prepare(_config())
    assert again.config.model.path == f"hf://acme/tiny@{commit}"
    assert pinned_run(_config()).model.path == f"hf://acme/tiny@{moved}"


def test_frozen_networks_keep_their_commits_too(hub: StandInHub) -> None:
    commit = hub.put("acme/tiny", MODEL)
    algorithm = {"adv_estimator": "mine.py:gap", "networks": {"teacher": "acme/tiny"}}
    config = _config(model={"path": "/srv/model"}, data={"train_files": "a.jsonl"}, algorithm=algorithm)
    assert uses_hub(config)
    pinned = pinned_run(config).algorithm
    assert pinned.networks["teacher"].path == f"hf://acme/tiny@{commit}"
    small = Path(local_folder("acme/tiny", config.model, weights=False))
    assert sorted(path.name for path in small.iterdir()) == ["config.json", "tokenizer.json"]


def test_services_may_ask_the_hub_only_for_names(hub: StandInHub) -> None:
    commit = hub.put("acme/tiny", MODEL)
    hub.put("openai/gsm8k", GSM8K, kind="datasets")
    by_name, by_path = _config(), _config(model={"path": "/srv/model"}, data={"train_files": "a.jsonl"})
    assert uses_hub(by_name)
    assert not uses_hub(by_path)
    assert "HF_HUB_OFFLINE" not in describe(by_name)
    assert "HF_HUB_OFFLINE=1" in describe(by_path)
    assert commit


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("train run.yaml --dry-run --offline", "acme/tiny"),
        ("init new.yaml --model acme/tiny --data openai/gsm8k --reward gsm8k --offline", "openai/gsm8k"),
    ],
)
def test_the_option_offline_reaches_the_hub_s_library(
    hub: StandInHub, tmp_path: Path, words: str, name: str
) -> None:
    hub.put("acme/tiny", MODEL)
    hub.put("openai/gsm8k", GSM8K, kind="datasets")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(_config().model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *words.split()],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert f"{name} is not a folder or file here" in done.stderr
    assert "--offline" in done.stderr
    assert hub.requests == []


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint, and an exporter that needs no weights."""
    run_dir = tmp_path / "runs" / "mine"
    (run_dir / "checkpoints" / "step_000002").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_000002" / "manifest.json").write_text("{}")
    config = _config(
        trainer={"total_steps": 4, "name": "sums"}, data={"train_files": "/home/ann/secret/a.jsonl"}
    )
    (run_dir / "config.resolved.yaml").write_text(dump_yaml(config))
    rows = [{"step": s, "val/reward/mean": s / 4, "critic/score/mean": 0.5} for s in (0, 1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def write(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        for name, data in MODEL.items():
            if "/" not in name:
                Path(command[-1]).mkdir(exist_ok=True)
                (Path(command[-1]) / name).write_bytes(data)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(export.subprocess, "run", write)
    monkeypatch.setenv("HF_TOKEN", "writer")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return run_dir


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's way to call httpx
def test_an_export_is_pushed_with_a_card_and_can_be_trained_from(
    hub: StandInHub, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(exported), "2", "out", "--push-to-hub", "ann/sums", "--private"]
    assert main(words) == 0
    assert re.search(r"pushed: http://127\.0\.0\.1:\d+/ann/sums/commit/[0-9a-f]{40}", capsys.readouterr().out)
    assert hub.created == {"ann/sums": True}
    assert hub.messages == ["Step 2 of sums, trained with Paceline"]
    folder = local_model(ModelConfig(path="ann/sums"), "learner").path
    assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["library_name"]) == ("acme/tiny", "transformers")
    assert "| validation reward | 0.000 (step 0), 0.500 (step 2) |" in card
    assert "`a.jsonl`" in card
    assert "/home/ann" not in card


@pytest.mark.parametrize(
    ("name", "token", "sentence"),
    [
        ("sums", "writer", "'sums' is not the name of a model on the hub; give ORG/NAME"),
        ("ann/sums@main", "writer", "'ann/sums@main' is not the name of a model"),
        ("ann/sums", "reader", r"did not take ann/sums \(HTTP 401\); set HF_TOKEN to a token that may write"),
    ],
)
def test_a_push_that_is_refused_says_why(
    hub: StandInHub,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    token: str,
    sentence: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert main(["export", str(exported), "2", "out", "--push-to-hub", name]) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert hub.messages == []
