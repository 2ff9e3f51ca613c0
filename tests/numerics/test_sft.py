"""Supervised fine-tuning: the loss is that of the answers, and it falls."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.config.load import dump_yaml, parse
from paceline.config.tuning import SftRunConfig
from paceline.core.errors import CheckpointError, DataError, ModelError
from paceline.learner.checkpoint.state import State
from paceline.learner.checkpoint.tuning_checkpoints import TuningCheckpoints
from paceline.learner.distributed.ranks import RankEnvironment, Ranks, leave_group
from paceline.learner.model.loading import Precision, load_policy
from paceline.learner.pair_training import batch_indices, form_ranks, take_steps
from paceline.learner.sft import Pair, SftTrainer, read_pairs, train
from support.byte_tokenizer import save_tokenizer
from support.forked import run
from support.learner_fakes import VOCAB_SIZE, write_model
from support.learner_ranks import alone

pytestmark = pytest.mark.torch


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


def config_of(model: Path, tmp_path: Path, **sft: object) -> SftRunConfig:
    tree = {
        "sft": {
            "train_files": str(tmp_path / "pairs.jsonl"),
            "output": str(tmp_path / "out"),
            "steps": 30,
            "batch_size": 8,
            "lr": 1e-2,
            **sft,
        },
        "data": {"max_prompt_length": 16, "max_response_length": 8},
        "model": {"path": str(model)},
        "learner": {"device": "cpu", "threads": 1},
    }
    return parse(SftRunConfig, tree)


def copying_pairs(num: int) -> list[Pair]:
    """The answer repeats the prompt's first token."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, int(rng.integers(1, 4))).astype(np.int32) for _ in range(num)]
    return [Pair(prompt=prompt, answer=np.array([prompt[0], 1], np.int32)) for prompt in prompts]


def test_the_loss_is_the_answers_mean_negative_log_prob_and_falls(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    pairs = copying_pairs(8)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for pair in pairs:
        ids = torch.from_numpy(np.concatenate([pair.prompt, pair.answer]).astype(np.int64))
        log_probs = reference(ids[None]).logits[0].log_softmax(-1)[len(pair.prompt) - 1 : -1]
        losses += (-log_probs.gather(-1, ids[len(pair.prompt) :, None])).flatten().tolist()
    network = load_policy(model, ranks, Precision(compute=torch.float32))
    trainer = SftTrainer(config_of(model, tmp_path).sft, network, ranks)
    assert trainer.loss(pairs) == pytest.approx(np.mean(losses), rel=1e-5)
    seen = [trainer.step(step, pairs) for step in range(1, 31)]
    assert seen[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert seen[-1]["loss"] < 0.1 * seen[0]["loss"]
    assert seen[0]["lr"] == pytest.approx(1e-2 * 1 / 2)


def test_batches_visit_every_pair_once_an_epoch_in_an_order_of_the_seed() -> None:
    batches = list(islice(batch_indices(10, 3, seed=1), 6))
    assert batches == list(islice(batch_indices(10, 3, seed=1), 6))
    assert batches != list(islice(batch_indices(10, 3, seed=2), 6))
    for epoch in (batches[:3], batches[3:]):
        assert len({index for batch in epoch for index in batch}) == 9
    with pytest.raises(DataError, match="2 pairs cannot fill sft.batch_size=3"):
        next(batch_indices(2, 3, seed=1))


def test_a_run_from_files_writes_a_model_folder_and_replaces_the_last_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = save_tokenizer(write_model(tmp_path / "start", vocab_size=260))
    pairs = [{"prompt": letter * 2, "answer": letter} for letter in "abcdefgh"] + [
        {"prompt": "x" * 17, "answer": "x"}
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = config_of(start, tmp_path, steps=12, batch_size=4)
    pairs, left_out = read_pairs(config, config.sft.train_files)
    assert (len(pairs), left_out) == (8, 1)
    assert (pairs[2].prompt.tolist(), pairs[2].answer.tolist()) == (
        AutoTokenizer.from_pretrained(start)("cc")["input_ids"],
        [*AutoTokenizer.from_pretrained(start)("c")["input_ids"], 1],
    )
    weights = []
    for _ in range(2):
        train(config, RankEnvironment.read({}))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    lines = capfd.readouterr().out.splitlines()
    assert "8 pairs (1 over-long left out), 12 steps of 4 on 1 cpu ranks" in lines[0]
    losses = [float(line.split()[4]) for line in lines if " loss " in line]
    assert losses[11] < 0.6 * losses[0]

    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelError, match="holds thesis.tex, which does not belong to a model folder"):
        train(config, RankEnvironment.read({}))
    torch.distributed.destroy_process_group()


_KILLED = """
import os, signal, sys
from paceline.learner import sft

def step(self, step, pairs, take=sft.SftTrainer.step):
    if step == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, step, pairs)

sft.SftTrainer.step = step
sft.main(["--config", sys.argv[1]])
"""


def test_a_killed_training_goes_on_and_gives_the_weights_of_an_undisturbed_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = save_tokenizer(write_model(tmp_path / "start", vocab_size=260))
    rows = [{"prompt": letter * 2, "answer": letter} for letter in "abcdefghij"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"steps": 12, "batch_size": 4, "save_freq": 3, "val_files": str(tmp_path / "pairs.jsonl")}
    undisturbed = config_of(start, tmp_path, **common, output=str(tmp_path / "undisturbed"))
    train(undisturbed, RankEnvironment.read({}))
    assert not (tmp_path / "undisturbed.checkpoints").exists()
    lines = capfd.readouterr().out.splitlines()

    config = config_of(start, tmp_path, **common)
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    killed = run(["-c", _KILLED, str(tmp_path / "run.yaml")], timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not (tmp_path / "out").exists()
    complete = [path.parent.name for path in (tmp_path / "out.checkpoints").glob("*/manifest.json")]
    assert set(complete) <= {"step_000003", "step_000006"}
    assert complete

    other = config_of(start, tmp_path, **{**common, "lr": 0.5})
    with pytest.raises(CheckpointError, match=r"another configuration or other data; remove .*out\.checkpoi"):
        train(other, RankEnvironment.read({}))
    torch.distributed.destroy_process_group()
    # What decides no number may change.
    train(config_of(start, tmp_path, **common, max_token_len_per_gpu=4096), RankEnvironment.read({}))
    resumed = capfd.readouterr().out.splitlines()
    done = int(max(complete).removeprefix("step_"))
    assert f"sft: goes on after step {done}" in resumed

    # Every later line has the undisturbed one's numbers, the held-out loss included; rates and times differ.
    def numbers(lines: list[str]) -> list[str]:
        return [line.partition(" lr ")[0] for line in lines if " loss " in line]

    assert numbers(resumed) == numbers(lines)[done:]
    assert len(numbers(resumed)) == 12 - done + 1
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "out.checkpoints").exists()


class CountingTuner:
    """Stands for a `Tuner`: a tensor, and the steps that were skipped."""

    def __init__(self) -> None:
        self.weight, self.numbers = torch.zeros(4), {"num_skipped": 0}

    def state(self) -> State:
        return {"network": {"w": self.weight}}

    def go_on(self, numbers: Mapping[str, int]) -> None:
        self.numbers = dict(numbers)


def test_an_interrupted_training_goes_on_with_its_skipped_steps_and_under_no_other_seed(
    tmp_path: Path,
) -> None:
    """Interrupted after its last step, before its model is written."""
    config = config_of(tmp_path, tmp_path, steps=3, save_freq=3)
    ranks = form_ranks(config.learner, RankEnvironment.read({}))

    def run(tuner: Any, config: SftRunConfig) -> list[int]:
        taken: list[int] = []

        def take_step(step: int, indices: list[int]) -> str:
            taken.append(step)
            tuner.numbers = {"num_skipped": step}
            return ""

        checkpoints = take_steps(config, config.sft, tuner, 10, take_step, name="sft", ranks=ranks)
        checkpoints._writer.finish()
        return taken

    assert run(CountingTuner(), config) == [1, 2, 3]
    resumed = CountingTuner()
    assert run(resumed, config) == []
    assert resumed.numbers == {"num_skipped": 3}
    other = config.model_copy(update={"seed": config.seed + 1})
    with pytest.raises(CheckpointError, match="another configuration or other data"):
        run(CountingTuner(), other)
    leave_group()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    ranks = form_ranks(config_of(tmp_path, tmp_path).learner, RankEnvironment.read({}))
    weight = torch.zeros(4)

    def checkpoints() -> TuningCheckpoints:
        return TuningCheckpoints(
            tmp_path / "x.checkpoints", {"network": {"w": weight}}, identity={}, save_freq=1, ranks=ranks
        )

    writing = checkpoints()
    for step in (1, 2, 3):
        weight.fill_(step)
        writing.after(step, {"num_skipped": 10 * step})
    writing._writer.finish()
    folders = sorted((tmp_path / "x.checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_000002", "step_000003"]
    shard = folders[1] / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpoints().load() == (2, {"num_skipped": 20})
    assert weight.tolist() == [2.0] * 4
    checkpoints().remove()
    assert checkpoints().load() == (0, {})
    leave_group()


def test_unusable_rows_are_named(tmp_path: Path) -> None:
    start = save_tokenizer(write_model(tmp_path / "start", vocab_size=260))
    config = config_of(start, tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "answer": 7}\n')
    with pytest.raises(DataError, match="row 0: column 'answer' holds int, need text"):
        read_pairs(config, config.sft.train_files)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "answer": "a rather long one"}\n')
    with pytest.raises(DataError, match="none of the 1 pairs fits"):
        read_pairs(config, config.sft.train_files)
