"""The controller gives the learner chunks while a step is collected, and the step is what it was without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Barrier
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.run.work_ahead import WorkAheadDriver
from paceline.core.errors import ConfigError, LostDataError
from paceline.core.guard import Adjustments
from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import SamplingSpec
from paceline.core.training import ChunkOrder
from support.headers import POLICY, scored
from support.sequencer_run import SequencerRun, prompts, run

AHEAD = {
    "data__train_batch_size": 6,
    "actor__ppo_mini_batch_size": 6,
    "algorithm__adv_estimator": "grpo",
    "barrier__work_ahead": "gradients",
    "barrier__prompts_per_chunk": 2,
}


def work(it: SequencerRun, orders: list[Any], act: Callable[[Any], Awaitable[None]] | None = None) -> None:
    """Has the fake learner keep the orders for chunks."""

    async def work_ahead(member: Any, order: Any) -> None:
        orders.append(order)
        it.services.calls.append(f"ahead {order.step} at {order.first_row}")
        if act is not None:
            await act(order)

    it.services.learner.work_ahead = work_ahead  # type: ignore[attr-defined]


async def test_the_chunks_are_rows_of_the_batch_and_come_before_it(tmp_path: Path) -> None:
    orders: list[Any] = []
    async with run(tmp_path, **AHEAD) as it:
        await it.enlist_all()
        work(it, orders)
        await it.go()
        assert it.breaches() == []
        for order in orders:
            batch = it.services.orders[order.step - 1]
            assert order.policy == batch.policy
            assert order.adjustments == batch.adjustments
            assert order.rows == batch.rows[order.first_row : order.first_row + 4]
            calls = it.services.calls
            assert calls.index(f"ahead {order.step} at {order.first_row}") < calls.index(
                f"train {order.step}"
            )
        assert orders
        # The last chunk of the mini-batch waits for the order to train.
        assert all(order.with_gradient and order.first_row < 8 for order in orders)


async def test_chunks_are_given_one_at_a_time_and_the_one_under_way_is_waited_for(tmp_path: Path) -> None:
    began, ends = asyncio.Queue[ChunkOrder](), asyncio.Queue[None]()

    class Learner:
        async def work_ahead(self, member: Any, order: ChunkOrder) -> None:
            began.put_nowait(order)
            await ends.get()

    async with run(tmp_path, **AHEAD) as it:
        learner: Any = Learner()
        ahead = WorkAheadDriver(it.run, learner, lambda: it.supervisor.learner)
        await it.enlist_all()
        order, barrier = order_and_barrier()
        collected, over = asyncio.Event(), asyncio.Event()

        async def collect() -> None:
            async with ahead.during(order, Adjustments()) as watch:
                assert watch is not None
                for prompt_id in range(6):
                    admit(barrier, prompt_id)
                    watch(barrier)
                await collected.wait()
            over.set()

        collecting = asyncio.create_task(collect())
        first = await began.get()
        assert (first.first_row, first.with_gradient) == (0, True)
        assert [row.trajectory_id.prompt_id for row in first.rows] == [0, 0, 1, 1]
        await asyncio.sleep(0.05)
        assert began.empty()
        ends.put_nowait(None)
        second = await began.get()
        assert (second.first_row, second.with_gradient) == (4, True)
        collected.set()
        await asyncio.sleep(0.05)
        assert not over.is_set()
        ends.put_nowait(None)
        await collecting
        assert began.empty()  # the barrier has closed: the rest is the step's


async def test_a_collection_that_fails_takes_the_work_with_it(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    class Learner:
        async def work_ahead(self, member: Any, order: ChunkOrder) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    async with run(tmp_path, **AHEAD) as it:
        learner: Any = Learner()
        await it.enlist_all()
        order, barrier = order_and_barrier()
        with pytest.raises(LostDataError):
            async with WorkAheadDriver(it.run, learner, lambda: it.supervisor.learner).during(
                order, Adjustments()
            ) as watch:
                assert watch is not None
                for prompt_id in (0, 1):
                    admit(barrier, prompt_id)
                watch(barrier)
                await asyncio.sleep(0.05)
                raise LostDataError("gone")
        assert cancelled.is_set()


async def test_with_rewards_that_are_normalized_over_the_batch_no_gradient_is_asked_for(
    tmp_path: Path,
) -> None:
    orders: list[ChunkOrder] = []

    class Learner:
        async def work_ahead(self, member: Any, order: ChunkOrder) -> None:
            orders.append(order)

    async with run(tmp_path, **AHEAD) as it:
        learner: Any = Learner()
        await it.enlist_all()
        order, barrier = order_and_barrier()
        async with WorkAheadDriver(it.run, learner, lambda: it.supervisor.learner).during(
            order, Adjustments()
        ) as watch:
            assert watch is not None
            for prompt_id in (0, 1):
                admit(barrier, prompt_id, normalized=(("f", 1.0, 0.5),))
            watch(barrier)
            await asyncio.sleep(0.05)
    assert [order.with_gradient for order in orders] == [False]


def admit(barrier: Barrier, prompt_id: int, **fields: Any) -> None:
    """Both samples of a prompt, with these fields changed."""
    for sample in range(2):
        header = replace(scored(prompt_id, sample), **fields)
        barrier.apply(header, barrier.judge(header))


def order_and_barrier() -> tuple[Order, Barrier]:
    """A collection of six prompts with two samples each."""
    sampling = SamplingSpec(temperature=1.0, max_tokens=8)
    order = Order(
        step=4,
        policy=POLICY,
        prompts=dict(prompts(6).prompts),
        asks=(Ask(purpose=Purpose.TRAIN, num_samples=2, sampling=sampling),),
    )
    barrier = Barrier(step=4, policy=POLICY, counts={"train": 2}, prompts=order.prompts)
    return order, barrier


async def test_a_learner_that_cannot_work_ahead_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orders: list[Any] = []

    async def fail(order: Any) -> None:
        raise LostDataError("a blob is gone")

    async with run(tmp_path, **AHEAD) as it:
        await it.enlist_all()
        work(it, orders, fail)
        await it.go()
        assert [len(order.rows) for order in it.services.orders] == [12, 12]
        assert len(orders) == len({order.step for order in orders})  # none after the first error of a step
    assert "no more work ahead of the barrier: a blob is gone" in caplog.text


async def test_nothing_is_given_without_the_setting(tmp_path: Path) -> None:
    orders: list[Any] = []
    async with run(tmp_path) as it:
        await it.enlist_all()
        work(it, orders)
        await it.go()
    assert orders == []


def config(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_files": "t.jsonl", "train_batch_size": 16},
        "model": {"path": "m"},
        "actor": {"ppo_mini_batch_size": 8},
        "algorithm": {"adv_estimator": "grpo"},
        "rollout": {"n": 4},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 2},
        "barrier": {"work_ahead": "gradients"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return parse(RunConfig, tree)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"adv_estimator": "gae"}}, "adv_estimator=gae looks at all samples"),
        (
            {"algorithm": {"adv_estimator": "reinforce_plus_plus_baseline"}},
            "looks at all samples of the batch",
        ),
        ({"algorithm": {"adv_estimator": "gpg"}}, "looks at all samples of the batch"),
        ({"algorithm": {"use_kl_in_reward": True}}, "read the log-probs of all samples before the update"),
        ({"algorithm": {"rollout_correction": {"method": "tis"}}}, "read the log-probs of all samples"),
        ({"algorithm": {"resample": {"method": "max_min"}}}, "read the log-probs of all samples"),
        ({"actor": {"policy_loss": "kl_cov"}}, "read the log-probs of all samples"),
        ({"actor": {"positive_loss_coef": 0.1}}, "counts of their own"),
        ({"actor": {"load_balance_coef": 0.1}}, "counts of their own"),
        ({"actor": {"router_bias_update_rate": 0.1}}, "counts of their own"),
        ({"algorithm": {"dynamic_sampling": {"enable": True}}}, "the place of a sample in the batch"),
        ({"placement": "colocated"}, "take turns on the same GPUs"),
        ({"rollout": {"sleep": "always"}}, "take turns on the same GPUs"),
        ({"barrier": {"prompts_per_chunk": 3}}, "must divide a mini-batch of 8 prompts"),
        ({"barrier": {"work_ahead": "off", "prompts_per_chunk": 4}}, "needs barrier.work_ahead"),
        (
            {"barrier": {"work_ahead": "scores"}, "actor": {"ppo_mini_batch_size": 16}},
            "there is nothing to score",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**sections)


def test_a_chunk_fills_a_micro_batch_of_every_rank() -> None:
    """4 samples of 512 + 256 tokens per prompt."""
    data = {"max_prompt_length": 512, "max_response_length": 512}
    assert config(data=data, actor={"ppo_max_token_len_per_gpu": 3072}).prompts_per_chunk == 1
    assert config(data=data, actor={"ppo_max_token_len_per_gpu": 3073}).prompts_per_chunk == 2
    two = config(data=data, actor={"ppo_max_token_len_per_gpu": 4096}, learner={"world_size": 2})
    assert two.prompts_per_chunk == 4
    assert config(data=data, actor={"ppo_max_token_len_per_gpu": 65536}).prompts_per_chunk == 8
    assert config(barrier={"prompts_per_chunk": 2}).prompts_per_chunk == 2
    critic = {"adv_estimator": "gae"}
    off = config(algorithm=critic, critic={"ppo_mini_batch_size": 4}, barrier={"work_ahead": "off"})
    assert off.prompts_per_chunk == 4
