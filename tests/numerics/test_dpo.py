"""Preferences: losses by transformers' log-probs, what is learned, adapters, several ranks, the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.config.load import dump_yaml, parse
from paceline.config.tuning import DpoRunConfig, SftRunConfig
from paceline.core.errors import ConfigError, DataError
from paceline.learner.checkpoint.tuning_checkpoints import TuningCheckpoints
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.dpo import DpoTrainer, Preference, read_preferences, train
from paceline.learner.model.folder import gathered_tensors
from paceline.learner.model.loading import Precision, load_policy
from support.byte_tokenizer import save_tokenizer
from support.dpo_ranks import steps
from support.learner_fakes import write_model
from support.learner_ranks import alone, run_ranks

pytestmark = pytest.mark.torch

PAIRS = [
    {"prompt": "2+2" + "?" * (n % 4), "chosen": "4" * n, "rejected": "5" * (1 + n % 3)} for n in range(1, 9)
]
FORMS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1, "sft_coef": 0.2},
    "ipo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "kto": {"beta": 0.3},
}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return Path(save_tokenizer(write_model(tmp_path / "start", vocab_size=260)))


def config_of(start: Path, tmp_path: Path, model: dict[str, Any] | None = None, **own: Any) -> DpoRunConfig:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    tree = {
        "dpo": {
            "train_files": str(tmp_path / "pairs.jsonl"),
            "output": str(tmp_path / "out"),
            "steps": 6,
            "batch_size": 4,
            "lr": 1e-3,
            **own,
        },
        "data": {"max_prompt_length": 16, "max_response_length": 16},
        "model": {"path": str(start), **(model or {})},
        "learner": {"device": "cpu", "threads": 1},
    }
    return parse(DpoRunConfig, tree)


class Oracle:
    """transformers' log-probs of whole answers, by the weights of a network or those in a folder."""

    def __init__(self, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if weights is not None:
            self._model.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def __call__(self, prompt: np.ndarray, answer: np.ndarray) -> float:
        ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))[None]
        scores = torch.log_softmax(self._model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])
        return float(scores[len(prompt) - 1 :].sum())


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def expected(
    kind: str, now: Oracle, before: Oracle, pairs: list[Preference], own: dict[str, Any]
) -> tuple[float, float]:
    """The loss of a batch as its paper writes it, and the mean margin of its answers' rewards."""
    beta, losses, margins = own["beta"], [], []
    shifted = [*pairs[1:], *pairs[:1]]
    others = [
        now(a.prompt, b.chosen) - before(a.prompt, b.chosen) for a, b in zip(pairs, shifted, strict=True)
    ]
    point = max(0.0, float(np.mean(others)))
    for pair in pairs:
        chosen, rejected = (now(pair.prompt, answer) for answer in (pair.chosen, pair.rejected))
        better = chosen - before(pair.prompt, pair.chosen)
        worse = rejected - before(pair.prompt, pair.rejected)
        lengths = len(pair.chosen), len(pair.rejected)
        match kind:
            case "dpo":
                gap = beta * (better - worse)
                loss = (
                    -0.9 * math.log(sigmoid(gap)) - 0.1 * math.log(sigmoid(-gap)) - 0.2 * chosen / lengths[0]
                )
            case "ipo":
                loss = (better / lengths[0] - worse / lengths[1] - 1 / (2 * beta)) ** 2
            case "simpo":
                loss = -math.log(sigmoid(beta * (chosen / lengths[0] - rejected / lengths[1]) - 0.7))
            case _:
                loss = (1 - sigmoid(beta * (better - point))) + (1 - sigmoid(beta * (point - worse)))
        losses.append(loss)
        means = chosen / lengths[0] - rejected / lengths[1]
        margins.append(beta * (means if kind == "simpo" else better - worse))
    return float(np.mean(losses)), float(np.mean(margins))


@pytest.mark.parametrize("kind", FORMS)
def test_the_loss_is_that_of_its_paper_and_falls(
    kind: str, start: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """After three steps, so that policy and reference differ; with micro-batches of a pair each."""
    own = FORMS[kind]
    config = config_of(start, tmp_path, loss=kind, max_token_len_per_gpu=60, **own)
    pairs = read_preferences(config, config.dpo.train_files)[0]
    network = load_policy(start, ranks, Precision(compute=torch.float32))
    batch = [4, 1, 6, 2]
    trainer = DpoTrainer(config, network, ranks, pairs, [batch] * 6, range(len(pairs)))
    told = [trainer.step(step, batch) for step in (1, 2, 3)]
    weights = {name: tensor.clone() for name, tensor in gathered_tensors(network, keep=True)}
    fourth = trainer.step(4, batch)
    want = expected(kind, Oracle(start, weights), Oracle(start), [pairs[index] for index in batch], own)
    assert (fourth["loss"], fourth["margin"]) == pytest.approx(want, rel=5e-5)
    assert fourth["loss"] < told[0]["loss"]
    assert fourth["margin"] > told[0]["margin"]
    assert trainer.accuracy(batch) == 1.0


def test_the_first_step_has_no_margin(start: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(start, tmp_path)
    pairs = read_preferences(config, config.dpo.train_files)[0]
    network = load_policy(start, ranks, Precision(compute=torch.float32))
    progress = DpoTrainer(config, network, ranks, pairs, [[0, 1, 2]]).step(1, [0, 1, 2])
    assert progress["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert progress["margin"] == pytest.approx(0, abs=1e-5)


def test_two_ranks_train_what_one_trains(start: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(start, tmp_path, loss="kto", max_token_len_per_gpu=60)
    file = tmp_path / "dpo.yaml"
    file.write_text(dump_yaml(config))
    single = steps(ranks, str(file))
    first, second = run_ranks("support.dpo_ranks:steps", 2, str(file))
    assert first == second
    for name in ("losses", "grad_norms", "margins", "weights"):
        assert first[name] == pytest.approx(single[name], rel=1e-5, abs=1e-6), name
    assert first["after"] == single["after"]


def test_a_training_that_was_interrupted_ends_as_one_that_was_not(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the starting model also after the start that goes on."""
    config_of(start, tmp_path)
    undisturbed = config_of(
        start, tmp_path, output=str(tmp_path / "undisturbed"), val_files=str(tmp_path / "pairs.jsonl")
    )
    train(undisturbed, RankEnvironment.read({}))
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("dpo: accuracy ") and line.endswith(" on 8 held-out pairs") for line in lines)

    config = config_of(start, tmp_path, save_freq=3)
    step, after = DpoTrainer.step, TuningCheckpoints.after

    def interrupted(trainer: DpoTrainer, number: int, indices: list[int]) -> Any:
        if number == 6:
            raise KeyboardInterrupt
        return step(trainer, number, indices)

    def written(checkpoints: TuningCheckpoints, number: int, numbers: dict[str, int]) -> None:
        after(checkpoints, number, numbers)
        checkpoints._finish()

    monkeypatch.setattr(DpoTrainer, "step", interrupted)
    monkeypatch.setattr(TuningCheckpoints, "after", written)
    with pytest.raises(KeyboardInterrupt):
        train(config, RankEnvironment.read({}))
    torch.distributed.destroy_process_group()
    monkeypatch.undo()
    train(config, RankEnvironment.read({}))
    assert "dpo: goes on after step 3" in capfd.readouterr().out
    ended, first = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "undisturbed"))
    assert all(torch.equal(ended[name], first[name]) for name in first)


def test_adapters_are_merged_and_kept_by_themselves(start: Path, tmp_path: Path) -> None:
    lora = {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}, "dtype": "float32"}
    train(config_of(start, tmp_path, lora, lr=1e-2), RankEnvironment.read({}))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "out"))
    adapters = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}
    for name in changed:
        a, b = (
            adapters[f"base_model.model.{name}".replace("weight", f"lora_{part}.weight")] for part in "AB"
        )
        torch.testing.assert_close(after[name], before[name] + 2 * b @ a)
    again = config_of(start, tmp_path, lora, lr=1e-2, steps=1)
    train(again, RankEnvironment.read({}))  # takes the place of the folder, the adapters in it included


def test_pairs_of_messages_and_what_cannot_be_read(start: Path, tmp_path: Path) -> None:
    config = config_of(start, tmp_path)
    answer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "44"}]
    rows = [
        {"prompt": "a", "chosen": answer, "rejected": "5"},
        {"prompt": "b" * 99, "chosen": "4", "rejected": "5"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, left_out = read_preferences(config, config.dpo.train_files)
    assert ([len(pair.chosen) for pair in pairs], left_out) == ([3], 1)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": answer[:1], "rejected": "5"}))
    with pytest.raises(
        DataError, match="row 0: column 'chosen' holds list, need text, or a list of messages"
    ):
        read_preferences(config, config.dpo.train_files)


def test_options_belong_to_a_loss_and_adapters_to_dpo(start: Path, tmp_path: Path) -> None:
    assert config_of(start, tmp_path).dpo.strength == 0.1
    assert config_of(start, tmp_path, loss="simpo").dpo.strength == 2.0
    with pytest.raises(ConfigError, match="gamma is an option of dpo.loss: simpo"):
        config_of(start, tmp_path, gamma=1.0)
    tree = {
        "sft": {"train_files": "x", "output": "y", "steps": 1},
        "data": {},
        "model": {"path": "z", "lora": {"rank": 4, "alpha": 8}},
    }
    with pytest.raises(ConfigError, match="train all weights"):
        parse(SftRunConfig, tree)
