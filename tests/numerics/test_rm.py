"""Reward models from pairs: the loss by transformers, the order that is learned, the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config.load import dump_yaml, parse
from paceline.config.tuning import RmRunConfig
from paceline.core.errors import DataError
from paceline.core.scoring import ScoreItem
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.model.loading import Precision, load_critic
from paceline.learner.rm import Comparison, RmTrainer, read_comparisons, train
from paceline.reward.models.model import ModelOptions
from paceline.reward.models.sequence import SequenceModel
from support.byte_tokenizer import save_tokenizer
from support.learner_fakes import write_model
from support.learner_ranks import alone, run_ranks
from support.rm_ranks import steps

pytestmark = pytest.mark.torch

PAIRS = [{"prompt": "2+2", "chosen": "4" * n, "rejected": "5" * (1 + n % 3)} for n in range(1, 9)]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return Path(save_tokenizer(write_model(tmp_path / "start", vocab_size=260)))


def config_of(start: Path, tmp_path: Path, **rm: object) -> RmRunConfig:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    tree = {
        "rm": {
            "train_files": str(tmp_path / "pairs.jsonl"),
            "output": str(tmp_path / "out"),
            "steps": 12,
            "batch_size": 4,
            "lr": 1e-2,
            **rm,
        },
        "data": {"max_prompt_length": 16, "max_response_length": 16},
        "model": {"path": str(start)},
        "learner": {"device": "cpu", "threads": 1},
    }
    return parse(RmRunConfig, tree)


def score_with_transformers(folder: Path, token_ids: np.ndarray) -> float:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        return float(model.score(model.base_model(input_ids=ids)[0][0, -1]))


def test_the_loss_is_that_of_bradley_and_terry_with_margin_and_centring(
    start: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Also where pairs are in micro-batches of their own: with a budget of one pair."""
    from transformers import AutoModelForSequenceClassification

    config = config_of(start, tmp_path, centring=0.25, max_token_len_per_gpu=40)
    head = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, dtype=torch.float32)
    head.save_pretrained(tmp_path / "headed")
    pairs = [
        Comparison(chosen=np.array([7, 8, 9]), rejected=np.array([7, 8]), margin=0.5),
        Comparison(chosen=np.array([3]), rejected=np.array([4, 5, 6, 7])),
    ]
    losses = []
    for pair in pairs:
        better, worse = (
            score_with_transformers(tmp_path / "headed", ids) for ids in (pair.chosen, pair.rejected)
        )
        losses.append(np.log1p(np.exp(-(better - worse - pair.margin))) + 0.25 * (better + worse) ** 2)
    network = load_critic(
        tmp_path / "headed", ranks, Precision(compute=torch.float32), seed=0, has_bias=False
    )
    trainer = RmTrainer(config, network, ranks)
    seen = [trainer.step(step, pairs) for step in range(1, 13)]
    assert seen[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert seen[-1]["loss"] < seen[0]["loss"]
    assert (seen[-1]["accuracy"], trainer.accuracy(pairs)) == (1.0, 1.0)
    assert trainer.accuracy([Comparison(chosen=pairs[0].rejected, rejected=pairs[0].chosen)]) == 0.0


def test_a_run_from_files_writes_a_reward_model_that_the_reward_service_loads(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(start, tmp_path, val_files=[str(tmp_path / "pairs.jsonl")])
    train(config, RankEnvironment.read({}))
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2] == "rm: accuracy 1.0000 on 8 held-out pairs"
    model = SequenceModel(ModelOptions(path=str(tmp_path / "out")))
    texts = [PAIRS[2]["chosen"], PAIRS[2]["rejected"]]
    items = [
        ScoreItem(trajectory_id=str(text), prompt="2+2", response=str(text), ground_truth="")
        for text in texts
    ]
    better, worse = model(items)
    assert better > worse
    pair = read_comparisons(config, config.rm.train_files)[0][2]
    assert better == pytest.approx(score_with_transformers(tmp_path / "out", pair.chosen), abs=1e-5)


def test_two_ranks_train_what_one_trains(start: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Five pairs of different lengths a step, some in micro-batches of their own."""
    config = config_of(start, tmp_path, max_token_len_per_gpu=60, lr=1e-3, centring=0.01)
    file = tmp_path / "rm.yaml"
    file.write_text(dump_yaml(config))
    single = steps(ranks, str(file))
    first, second = run_ranks("support.rm_ranks:steps", 2, str(file))
    assert first == second
    assert single["losses"][-1] < single["losses"][0]
    for name in ("losses", "grad_norms", "weights"):
        assert first[name] == pytest.approx(single[name], rel=1e-6, abs=1e-6), name
    assert (first["accuracies"], first["after"]) == (single["accuracies"], single["after"])


def test_pairs_that_do_not_fit_or_are_no_text_are_told(start: Path, tmp_path: Path) -> None:
    config = config_of(start, tmp_path, margin_key="margin")
    with pytest.raises(DataError, match="margin"):
        read_comparisons(config, config.rm.train_files)
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c" * 40, "margin": 1},
        {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c", "margin": 2},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, left_out = read_comparisons(config, config.rm.train_files)
    assert ([pair.margin for pair in pairs], left_out) == ([2.0], 1)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": 1, "rejected": "c", "margin": 1}')
    with pytest.raises(DataError, match="row 0: column 'chosen' holds int, need text"):
        read_comparisons(config, config.rm.train_files)
