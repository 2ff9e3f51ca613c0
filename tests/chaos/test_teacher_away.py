"""A whole run whose teacher goes away in mid-run, and comes back: the step waits, and no number changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.core.digest import DIGEST
from paceline.data.prompts import load_tokenizer
from paceline.sizing.machine import free_port
from support.fake_teacher import FakeTeacher, serving
from support.training_run import (
    TRANSPORT,
    assert_same_metrics,
    assert_sound,
    only,
    prepare_inputs,
    tiny_config,
    training,
    with_layers,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS, TOP_K = 5, 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_layers(prepare_inputs(tmp_path_factory.mktemp("inputs"), num_train=64, num_val=8), 1)


def configured(inputs: Path, port: int) -> dict[str, Any]:
    teacher = {"address": f"http://127.0.0.1:{port}/v1", "model": "big", "top_k": TOP_K}
    tree = tiny_config(
        inputs,
        data={"train_batch_size": 4, "max_response_length": 8},
        algorithm={"adv_estimator": "reinforce_plus_plus", "teacher": teacher},
        actor={"ppo_mini_batch_size": 2, "policy_loss": "distill"},
        rollout={"n": 2},
        learner={"world_size": 1},
        trainer={"total_steps": STEPS, "save_freq": 1, "test_freq": 2},
        guard={"throughput": {"warn": None}},
    )
    del tree["algorithm"]["kl_ctrl"], tree["critic"]
    return tree | {"algorithm": tree["algorithm"] | {"use_kl_in_reward": False}}


@contextmanager
def answering(inputs: Path, port: int) -> Iterator[FakeTeacher]:
    """A teacher that answers within it."""
    tokenizer = load_tokenizer(inputs / "model")
    fake = FakeTeacher(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], vocab_size=320)
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(fake, port):
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield fake
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_teacher_that_was_away_while_the_controller_was_killed_too(inputs: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        answering(inputs, port),
        training(configured(inputs, port), tmp_path / "quiet", forked=True) as quiet,
    ):
        assert quiet.finish() == 0, quiet.output
    with training(configured(inputs, port), tmp_path / "away", forked=True) as run:
        with answering(inputs, port):
            run.wait_for(lambda e: e["event"] == "step" and e["step"] == 2)
        run.wait_for_output("did not answer")
        run.kill_group("controller")
        run.wait_for(lambda e: e["event"] == "run" and e["term"] == 2)
        with answering(inputs, port) as fake:
            assert run.finish() == 0, run.output
    assert_sound(run)
    rows = [e for e in only(run.events, "trajectory") if e["id"].startswith("train:")]
    assert all(DIGEST.fullmatch(e["teacher"]) for e in rows if e["verdict"] == "admitted")
    assert fake.completions
    assert_same_metrics(run.metrics, quiet.metrics, without=TRANSPORT)
    trained = [line for line in run.metrics if "actor/pg_loss" in line]
    assert len({line["actor/pg_loss"] for line in trained}) == len(trained) == STEPS
