"""Supervised fine-tuning on prompts with images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from paceline.config.load import parse
from paceline.config.tuning import SftRunConfig
from paceline.data.images import ImageReader
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.model.loading import Precision, hugging_face_names, load_policy
from paceline.learner.sft import SftTrainer, read_pairs, train
from support.image_rows import reference_log_probs
from support.learner_ranks import alone
from support.tiny_vl import save_tiny_vl

pytestmark = pytest.mark.torch

BUDGET = 200
"""Tokens and patches of a micro-batch: room for two of the pairs."""


def sft_config(model: Path, folder: Path, part: str, **sft: Any) -> SftRunConfig:
    """Answers that name the colour of a picture, for a real image processor and tokenizer."""
    rows = []
    for number, colour in enumerate(["red", "blue"] * 2):
        size = (56 + 28 * (number // 2), 56)
        Image.new("RGB", size, colour).save(folder / f"{number}.png")
        rows.append({"prompt": "Colour? <image>", "answer": colour[0], "pictures": f"{number}.png"})
    rows[3]["prompt"], rows[3]["pictures"] = "<image> or <image>?", ["3.png", "0.png"]
    rows.append({"prompt": "No picture.", "answer": "n", "pictures": None})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "sft": {"train_files": str(file), "output": str(folder / "out"), "steps": 8, "batch_size": 5, **sft},
        "data": {"image_key": "pictures", "prompt_format": "chat", "max_prompt_length": 128},
        "model": {"path": str(model), "vision": {"train": part}},
        "learner": {"device": "cpu", "threads": 1},
    }
    return parse(SftRunConfig, tree)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with tokenizer and image processor."""
    return save_tiny_vl(tmp_path_factory.mktemp("published"), seed=3, kind="qwen3_vl")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


def test_supervised_tuning_sees_the_images_and_trains_the_tower(
    published: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config = sft_config(published, tmp_path, "all", lr=1e-3, max_token_len_per_gpu=BUDGET)
    reader = ImageReader.load(config.data, published)
    pairs, num_left_out = read_pairs(config, config.sft.train_files, reader)
    assert (len(pairs), num_left_out, [len(pair.images) for pair in pairs]) == (5, 0, [1, 1, 1, 2, 0])
    network = load_policy(published, ranks, Precision(compute=torch.float32), vision="all")
    trainer = SftTrainer(config.sft, network, ranks, reader)
    lm: Any = AutoModelForImageTextToText.from_pretrained(published, dtype=torch.float64)
    rows = [trainer._row(index, pair) for index, pair in enumerate(pairs)]
    expected = torch.cat([reference_log_probs(lm, row) for row in rows]).mean()
    started = {name: p.detach().clone() for name, p in lm.named_parameters()}
    for batch in trainer._batches(pairs):
        num_patches = 0 if batch.images is None else len(batch.images.pixels)
        assert batch.input_ids.shape[1] + num_patches <= BUDGET
    losses = [trainer.step(step, pairs)["loss"] for step in range(1, 9)]
    assert losses[0] == pytest.approx(-float(expected.detach()), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    parameters: list[tuple[str, Any]] = list(hugging_face_names(network))
    for name, parameter in parameters:
        assert not torch.equal(parameter.full_tensor(), started[name].float()), name


def test_a_tuning_writes_the_trained_tower(published: Path, tmp_path: Path) -> None:
    train(sft_config(published, tmp_path, "projector", steps=2), RankEnvironment.read({}))
    before, after = (load_file(path / "model.safetensors") for path in (published, tmp_path / "out"))
    tower = {name for name in before if "visual." in name}
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in tower if "merger" not in name}
    assert before.keys() == after.keys()
    assert len(unchanged) > 20
