"""The learner as the processes that it is: two ranks over gloo, a fake controller, a real Redis, gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from paceline.broker.redis.redis_server import RedisServer
from paceline.core.errors import (
    CheckpointError,
    IllegalTransitionError,
    LostDataError,
    VersionMismatchError,
)
from paceline.core.guard import Adjustments
from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder
from paceline.learner.train.state.learner import Learner as TrainingLearner
from paceline.rpc.v1 import learner_pb2
from paceline.weights.geometry.layout import tensor_shapes
from paceline.weights.geometry.sharding import Sharding
from paceline.wire.calls.training import chunk_to_proto, order_to_proto
from support import learner_scenarios as scenarios
from support.learner_fakes import POLICY, make_batch, run_config, write_model
from support.learner_processes import Learner, running
from support.learner_ranks import alone

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def put(redis_server: RedisServer, blobs: dict[str, bytes]) -> None:
    client = redis.Redis.from_url(redis_server.url, protocol=2)
    client.mset(blobs)
    client.close()


def numbers(reply: learner_pb2.TrainStepResponse) -> dict[str, float]:
    return {
        name: value for name, value in reply.metrics.items() if not name.startswith(("timing_s/", "perf/"))
    }


async def going_back(learner: Learner, folder: Path, batch: Any) -> None:
    """At version 3, rolls back to step 2 and trains step 4 at half the rate; failed loads change nothing."""

    async def load(source: Path, version: int) -> learner_pb2.LoadCheckpointResponse:
        request = learner_pb2.LoadCheckpointRequest(folder=str(source), version=version)
        return await learner.call(learner.stub.LoadCheckpoint, request)

    with pytest.raises(CheckpointError, match="is at version 3, asked to load a checkpoint as version 2"):
        await load(folder, 2)
    with pytest.raises(CheckpointError, match="nowhere is no complete checkpoint"):
        await load(folder.parent / "nowhere", 3)
    assert (await load(folder, 3)).seconds > 0
    described = await learner.call(learner.stub.DescribeWeights, learner_pb2.DescribeLearnerWeightsRequest())
    assert described.version == 3
    rows, policy = _order(batch)
    adjustments = Adjustments(lr_scale=0.5, kl_scale=1.0, fixed_kl_coef=0.25)
    order = TrainOrder(step=4, policy=policy, rows=rows, adjustments=adjustments)
    reply = await learner.call(learner.stub.TrainStep, order_to_proto(order))
    assert reply.step == 4
    assert reply.metrics["actor/lr"] == 0.5e-3
    assert reply.metrics["algorithm/kl_coef"] == 0.25
    readings = {(reading.rule, reading.network): reading.value for reading in reply.guard_readings}
    assert readings["ppo_kl", "actor"] == reply.metrics["actor/ppo_kl_max"]
    assert {"vf_clipfrac", "entropy_low", "reference_kl", "reward_constant"} <= {rule for rule, _ in readings}


async def after_a_controller_restart(
    learner: Learner,
    batch: tuple[tuple[BatchRow, ...], dict[str, bytes], PolicyTag],
    result: learner_pb2.TrainStepResponse,
) -> None:
    """The new controller knows nobody. The learner says which version it holds, and repeats its result."""
    controller = learner.controller
    controller.known, num_before = False, len(controller.registrations)
    async with asyncio.timeout(60):
        while len(controller.registrations) == num_before:
            controller.heard.clear()
            await controller.heard.wait()
    again = controller.registrations[-1]
    assert again.incarnation == controller.registrations[0].incarnation
    assert (again.state, again.policy.version) == ("ready", 1)
    assert dict((await learner.train(1, *_order(batch))).metrics) == dict(result.metrics)


async def saving_beside_a_step(
    learner: Learner, folder: Path, batch: tuple[tuple[BatchRow, ...], dict[str, bytes], PolicyTag]
) -> learner_pb2.TrainStepResponse:
    """The checkpoint of step 2 is written while step 3 trains, of which a half is scored before."""
    save = learner_pb2.SaveCheckpointRequest(step=2, folder=str(folder), controller_state=b'{"cursor": 7}')
    await learner.call(learner.stub.SaveCheckpoint, save)
    await working_ahead(learner, *_order(batch))
    third = await learner.train(3, *_order(batch))
    written = learner_pb2.WaitCheckpointRequest(step=2)
    assert (await learner.call(learner.stub.WaitCheckpoint, written)).seconds > 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["controller_state"] == {"cursor": 7}
    assert manifest["learner"]["version"] == 2
    assert set(manifest["files"]) == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    return third


async def working_ahead(learner: Learner, rows: tuple[BatchRow, ...], policy: PolicyTag) -> None:
    """The second half of step 3 is scored; what cannot be is refused, and nothing has happened."""
    order = ChunkOrder(step=3, policy=policy, first_row=16, rows=rows[16:])
    await learner.call(learner.stub.WorkAhead, chunk_to_proto(order))
    with pytest.raises(IllegalTransitionError, match="can train step 3 next; asked for step 4"):
        await learner.call(learner.stub.WorkAhead, chunk_to_proto(replace(order, step=4)))
    gone = replace(order, first_row=0, rows=(replace(rows[0], blob_key="gone"), *rows[1:16]))
    with pytest.raises(LostDataError, match="gone"):
        await learner.call(learner.stub.WorkAhead, chunk_to_proto(gone))


async def told_to_restart(learner: Learner) -> None:
    """It answers, and then all ranks end in order; rank 0's exit code says that a new start can help."""
    await learner.call(learner.stub.Restart, learner_pb2.RestartRequest(reason="the data of step 5 is gone"))
    async with asyncio.timeout(60):
        codes = [await asyncio.to_thread(rank.wait) for rank in learner.ranks]
    assert codes == [1, 0]
    assert learner.failure == ("starting again: the data of step 5 is gone", False)


def damaged_copy(folder: Path, name: str) -> Path:
    """A checkpoint with a bit flipped in what rank 1 wrote."""
    copy = Path(shutil.copytree(folder, folder.parent / name))
    shards = bytearray((copy / "__1_0.distcp").read_bytes())
    shards[len(shards) // 3] ^= 4
    (copy / "__1_0.distcp").write_bytes(bytes(shards))
    return copy


async def describing_its_weights(learner: Learner) -> None:
    """Both ranks' slices make up every tensor of the policy, and nothing of the critic."""
    described = await learner.call(learner.stub.DescribeWeights, learner_pb2.DescribeLearnerWeightsRequest())
    layouts = Sharding.from_bytes(described.sharding)
    num_elements = sum(part.box.volume for layout in layouts for part in layout.slices)
    shapes = tensor_shapes(layouts)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (24, 41)
    assert "value_head.weight" not in shapes
    assert num_elements == sum(_volume(shape) for shape in shapes.values())
    assert described.version == 0


async def losing_a_rank(learner: Learner) -> None:
    """Rank 0 names the rank that it lost, and ends."""
    os.kill(learner.ranks[1].pid, signal.SIGKILL)
    assert await asyncio.wait_for(asyncio.to_thread(learner.ranks[0].wait), 240) == 1
    assert "lost rank 1 (" in learner.failure[0]


async def test_two_ranks_that_share_rows_compute_what_one_does(
    model: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    rows, blobs = make_batch(step=1, seed=1)
    put(redis_server, blobs)
    shared = {"world_size": 2, "context_parallel": 2}
    async with running(model, redis_server.url, tmp_path, learner=shared) as learner:
        await describing_its_weights(learner)
        reply = await learner.train(1, rows, POLICY)
    with alone() as ranks:
        expected = scenarios.train(TrainingLearner.build(run_config(model), ranks), 1, 1)
    assert numbers(reply) == pytest.approx(expected[0], rel=1e-4, abs=1e-6)


async def test_a_run_of_two_ranks(model: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    batches = {}
    for step in (1, 2, 3, 4):
        policy = PolicyTag(version=step - 1, digest=POLICY.digest)
        batches[step] = (*make_batch(step=step, policy=policy), policy)
        put(redis_server, batches[step][1])
    folder = tmp_path / "checkpoints" / "step_000002"

    async with running(model, redis_server.url, tmp_path) as learner:
        assert learner.controller.registrations[0].num_ranks == 2
        await describing_its_weights(learner)

        rows, _, policy = batches[1]
        stale = PolicyTag(version=0, digest="f" * 16)
        with pytest.raises(
            VersionMismatchError, match="v0@0123456789abcdef, the step trains on v0@ffffffffffffffff"
        ):
            await learner.train(1, rows, stale)
        with pytest.raises(
            IllegalTransitionError, match="holds version 0 and can train step 1 next; asked for step 2"
        ):
            await learner.train(2, rows, policy)

        first = await learner.train(1, rows, policy)
        again = await learner.train(1, rows, policy)
        assert dict(again.metrics) == dict(first.metrics)
        assert (first.step, list(first.skip_reasons)) == (1, [])
        assert first.metrics["actor/first_ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert first.metrics["critic/grad_norm"] > 0
        await after_a_controller_restart(learner, batches[1], first)
        await learner.train(2, *_order(batches[2]))

        third = await saving_beside_a_step(learner, folder, batches[3])
        await going_back(learner, folder, batches[4])
        states = [beat.state for beat in learner.controller.heartbeats]
        assert {"loading", "ready", "training", "rolling back"} <= set(states)

        await told_to_restart(learner)

    damaged = damaged_copy(folder, "step_000003")
    async with running(model, redis_server.url, tmp_path, checkpoints=[damaged, folder]) as learner:
        notices = [beat.notice for beat in learner.controller.heartbeats if beat.notice]
        assert len(notices) == 1
        assert "step_000003 is damaged and passed over" in notices[0]
        assert "__1_0.distcp has changed" in notices[0]
        resumed = await learner.train(3, *_order(batches[3]))
        assert numbers(resumed) == numbers(third)

        await losing_a_rank(learner)


def _order(
    batch: tuple[tuple[BatchRow, ...], dict[str, bytes], PolicyTag],
) -> tuple[tuple[BatchRow, ...], PolicyTag]:
    return batch[0], batch[2]


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for extent in shape:
        volume *= extent
    return volume
