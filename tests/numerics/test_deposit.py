"""The learner's log-probs that people see beside the engine's: of the weights from before the update."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.broker import names
from paceline.core.errors import BrokerError
from paceline.core.training import TrainOrder
from paceline.learner.batch.blobs import deposit_log_probs, fetch_rows
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow, ScoredBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.step import train_step
from paceline.wire import decode_log_probs
from support.learner_fakes import POLICY, DictBlobs, make_batch, run_config

pytestmark = pytest.mark.torch


class FullServer:
    """Takes nothing."""

    def put(self, blobs: Mapping[str, bytes]) -> None:
        raise BrokerError("OOM command not allowed")


@pytest.mark.parametrize("use_kl_loss", [False, True], ids=["no reference", "KL in the loss"])
@pytest.mark.parametrize("step", [1, 2], ids=["all scored before the update", "some by the update itself"])
def test_the_deposited_log_probs_are_those_before_the_update(
    model: Path, ranks: Ranks, step: int, use_kl_loss: bool
) -> None:
    from transformers import AutoModelForCausalLM

    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}
    actor = {"use_kl_loss": use_kl_loss}
    config = run_config(model, rollout={"n": 4, "temperature": 0.7}, algorithm=algorithm, actor=actor)
    assert not config.needs_all_old_log_probs
    learner = Learner.build(config, ranks)
    rows, blobs = make_batch(step=step)
    store, stored = DictBlobs(blobs), set(blobs)
    train_step(
        learner,
        TrainOrder(step=step, policy=POLICY, rows=rows),
        lambda wanted: fetch_rows(store, rows, wanted, policy=POLICY, vocab_size=learner.vocab_size),
        lambda scored: deposit_log_probs(store, rows, scored),
    )
    assert len(store.blobs) - len(stored) == len(rows) == 32
    sequences = fetch_rows(store, rows, range(len(rows)), policy=POLICY, vocab_size=learner.vocab_size)
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    for index, row in enumerate(rows):
        prompt, response = sequences[index].prompt_token_ids, sequences[index].response_token_ids
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            scores = (network(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        expected = scores.gather(-1, ids[len(prompt) :, None]).squeeze(-1).numpy()
        data = store.blobs[names.learner_log_probs(row.blob_key)]
        np.testing.assert_allclose(decode_log_probs(data, len(response)), expected, atol=1e-4)


def row_of_a_tool() -> ScoredBatch:
    """A response whose second token the policy did not sample."""
    row = PackedRow(
        index=0,
        prompt_token_ids=np.array([5], np.int32),
        response_token_ids=np.array([6, 7, 8], np.int32),
        response_mask=np.array([1, 0, 1], np.uint8),
        response_log_probs=np.array([-1, 0, -3], np.float32),
    )
    batch = pack([row], torch.device("cpu"))
    return ScoredBatch(batch=batch, log_probs={"old": torch.tensor([[-1.0, -2.0, -3.0]])})


def test_tokens_of_a_tool_have_no_log_prob_and_rows_without_any_are_left_out() -> None:
    rows, _ = make_batch()
    filler = ScoredBatch(batch=pack([], torch.device("cpu")), log_probs={"old": torch.zeros(1, 1)})
    unknown = ScoredBatch(batch=row_of_a_tool().batch, log_probs={})
    store = DictBlobs({})
    deposit_log_probs(store, rows, [row_of_a_tool(), filler, unknown])
    (data,) = store.blobs.values()
    assert decode_log_probs(data, 3).tolist() == [-1.0, 0.0, -3.0]


def test_a_server_that_takes_nothing_costs_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = make_batch()
    with caplog.at_level(logging.WARNING):
        deposit_log_probs(FullServer(), rows, [row_of_a_tool()])
    assert "lack the learner's log-probs: OOM" in caplog.text
