"""Prompt groups on a rollout server: drawn, refused, drawn again, given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.core.errors import (
    PeerLostError,
)
from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import SamplingSpec
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import SampleRequest
from paceline.wire import (
    blob_digest,
    encode_prompt_group,
)
from support.fake_engine import FakeEngine
from support.memory_broker import MemoryBroker
from support.rollout_bench import LIMITS, RUN, V0, V1, bench, group
from support.sequencer_run import config


async def test_headers_and_blobs_carry_what_was_drawn() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.ask(group(7, samples=3))
        for header in await b.headers(3):
            blob = await b.blob(header)
            index = header.trajectory_id.sample_index
            expected = b.engine.sample(
                _request(seed=group(7).seeds[index], prompt=(5, 7), sampling=group(7).sampling)
            )
            assert blob.trajectory_id == header.trajectory_id
            assert blob.response_token_ids.tolist() == expected.token_ids.tolist()
            assert blob.response_log_probs.tolist() == expected.log_probs.tolist()
            assert blob.response_mask.tolist() == [1] * len(expected.token_ids)
            assert blob.seed == group(7).seeds[index]
            assert (blob.policy, blob.finish_reason) == (V0, expected.finish_reason)
            assert header.server_id == "rollout-0"
            assert (header.num_prompt_tokens, header.num_response_tokens) == (2, len(expected.token_ids))
            assert header.context.ground_truth == "7"


def _request(*, seed: int, prompt: tuple[int, ...], sampling: SamplingSpec) -> SampleRequest:
    return SampleRequest(request_id="x", prompt_token_ids=prompt, sampling=sampling, seed=seed)


async def test_a_group_of_another_digest_is_refused_and_acknowledged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        await b.push(V0)
        stranger = replace(V0, digest="f" * 16)
        await b.ask(group(1, stranger), group(2))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.policy, refusal.reason) == (1, stranger, "wrong_policy")
        assert refusal.message == "prompt 1 wants v0@ffffffffffffffff, this server holds v0@0000000000000000"
        assert (refusal.run_id, refusal.step, refusal.purpose) == (RUN, 1, Purpose.TRAIN)
        assert (refusal.server_id, refusal.deliveries) == ("rollout-0", 1)
        assert await b.left_over(0) == 0
        assert "reason=wrong_policy" in caplog.text


async def test_a_group_of_an_older_version_is_only_acknowledged() -> None:
    async with bench() as b:
        await b.push(V1)
        await b.ask(group(1, V0), version=1)
        await b.ask(group(2, V1))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        assert await b.left_over(1) == 0
        assert await b.refusals(0) == []


async def test_what_cannot_be_served_is_refused_at_once_with_its_reason() -> None:
    async with bench() as b:
        await b.push(V0)
        torn = msgpack.unpackb(encode_prompt_group(group(4)))
        for payload in (b"nonsense", msgpack.packb({**torn, "seeds": "none"})):
            await b.broker.append([Outgoing(stream=names.prompts(RUN, 0), payload=payload)])
        await b.ask(group(1, prompt_token_ids=np.array([64], np.int32)))  # the vocabulary ends at 63
        await b.ask(group(2, run_id="run-2"), version=0)
        await b.ask(group(3))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {3}
        refused = {(r.prompt_id, r.run_id, r.reason) for r in await b.refusals(3)}
        assert refused == {(1, RUN, "out_of_range"), (2, "run-2", "wrong_run"), (4, RUN, "wrong_type")}
        assert await b.left_over(0) == 0


async def test_a_request_that_the_engine_refuses_is_its_groups_and_nobody_elses() -> None:
    async with bench(engine=FakeEngine(max_model_len=5)) as b:
        await b.push(V0)
        await b.ask(group(1, prompt_token_ids=np.arange(6, dtype=np.int32)), group(2))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {2}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (1, "refused_by_engine", 1)
        assert "the prompt is too long" in refusal.message


async def test_an_engine_error_is_the_groups_which_is_given_up_after_so_many_deliveries() -> None:
    async with bench(limits=replace(LIMITS, lease_s=1.5)) as b:
        await b.push(V0)
        b.engine.errors[(5, 3)] = RuntimeError("an illegal\ninstruction \ud800")
        await b.ask(group(3), group(4))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {4}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "engine_error", 3)
        assert refusal.message == "RuntimeError: an illegal instruction \\ud800"
        assert b.engine.named("generate").count((5, 3)) == 3
        assert await b.left_over(0) == 0
        await b.ask(group(5))
        await b.headers(4)


async def test_a_group_that_fails_once_gets_the_same_samples_on_its_second_delivery() -> None:
    async with bench(limits=replace(LIMITS, lease_s=1.5)) as b:
        await b.push(V0)
        b.engine.errors[(5, 3)] = PeerLostError("aborted", peer="engine")
        await b.ask(group(3))
        await b.quiet(1)
        b.engine.errors.clear()
        headers = await b.headers(4)
        assert [h.trajectory_id.sample_index for h in headers] == [0, 1, 2, 3]
        for header, seed in zip(headers, group(3).seeds, strict=True):
            expected = b.engine.sample(_request(seed=seed, prompt=(5, 3), sampling=group(3).sampling))
            assert (await b.blob(header)).response_token_ids.tolist() == expected.token_ids.tolist()


async def test_a_group_that_takes_too_long_is_drawn_again_and_then_given_up() -> None:
    async with bench(limits=replace(LIMITS, group_timeout_s=0.5, lease_s=1.5)) as b:
        await b.push(V0)
        b.engine.stuck.add((5, 3))
        await b.ask(group(3), group(4))
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {4}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "deadline", 3)
        assert refusal.message.startswith("prompt 3 was not drawn within 0.5 s; raise rollout.")
        assert b.engine.named("abort").count((5, 3)) == 3


async def test_an_engine_that_answers_nothing_any_more_ends_the_service() -> None:
    with pytest.raises(PeerLostError, match=r"the engine hangs: prompt 3 was not drawn within 0.05 s"):
        async with bench(limits=replace(LIMITS, group_timeout_s=0.05, probe_timeout_s=0.05)) as b:
            await b.push(V0)
            b.engine.hold()
            await b.ask(group(3))
            await asyncio.sleep(120)


async def test_a_group_whose_takers_died_is_given_up_without_another_attempt() -> None:
    async with bench(limits=replace(LIMITS, lease_s=1.5)) as b:
        stream = names.prompts(RUN, 0)
        await b.ask(group(3), group(4))
        await b.broker.ensure_group(stream, names.ROLLOUT_GROUP)
        await b.broker.read(stream, names.ROLLOUT_GROUP, "dead/1", max_entries=1, block_s=0)
        for taker in ("dead/2", "dead/3"):
            await b.broker.reclaim(stream, names.ROLLOUT_GROUP, taker, min_idle_s=0, max_entries=9)
        await b.push(V0)
        assert {h.trajectory_id.prompt_id for h in await b.headers(4)} == {4}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "max_deliveries", 4)
        assert "was taken 3 times, and no server has answered" in refusal.message
        assert (5, 3) not in b.engine.named("generate")


async def test_an_engine_that_fails_every_group_ends_the_service() -> None:
    with pytest.raises(PeerLostError, match="8 prompt groups failed one after the other; .*RuntimeError: x"):
        async with bench() as b:
            await b.push(V0)
            b.engine.errors.update({(5, p): RuntimeError("x") for p in range(8)})
            await b.ask(*(group(p) for p in range(8)))
            await asyncio.sleep(120)


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({"data__max_response_length": 1024}, (600.0, 900.0, 1800.0)),
        ({"data__max_response_length": 32_000}, (6400.0, 9600.0, 19_200.0)),
        ({"data__max_response_length": 32_000, "rollout__request_timeout_s": 10.0}, (10.0, 15.0, 30.0)),
        ({"barrier__stall_timeout_s": 7.0, "barrier__collect_timeout_s": 8.0}, (600.0, 7.0, 8.0)),
    ],
)
def test_deadlines_follow_the_response_length(keys: dict[str, float], seconds: tuple[float, ...]) -> None:
    changed = config(**{"barrier__stall_timeout_s": None, **keys}, actor__ppo_max_token_len_per_gpu=40_000)
    limits = SamplerLimits.of(changed)
    assert (limits.group_timeout_s, limits.append_timeout_s, changed.collect_timeout_s) == seconds
    assert limits.max_deliveries == 6


async def test_two_draws_of_one_sample_never_share_a_blob() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.ask(group(1), group(1))
        headers = await b.headers(8)
        assert len({h.blob_key for h in headers}) == 8
        assert headers[0].blob_key.startswith(names.blob(RUN, "train:1:1:0", "rollout-0", "x."))
        for header in headers:
            [data] = await b.broker.get_blobs([header.blob_key])
            assert data is not None
            assert blob_digest(data) == header.blob_digest


class DiesBeforeTheAcknowledgement(MemoryBroker):
    """The process is gone after its results are stored, if an acknowledgement is a second command."""

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        if stream == names.prompts(RUN, 0):
            await asyncio.sleep(3600)
        await super().ack(stream, group, entry_ids)


async def test_results_and_acknowledgement_are_stored_together() -> None:
    async with bench(broker=DiesBeforeTheAcknowledgement()) as b:
        await b.push(V0)
        await b.ask(group(1))
        await b.headers(4)
        assert await b.left_over(0) == 0


async def test_a_group_delivered_twice_is_drawn_twice_with_the_same_tokens() -> None:
    async with bench() as b:
        await b.push(V0)
        await b.ask(group(1), group(1))
        headers = await b.headers(8)
        drawn = [(await b.blob(h)).response_token_ids.tolist() for h in headers]
        ids = [h.trajectory_id.sample_index for h in headers]
        assert ids == [0, 1, 2, 3, 0, 1, 2, 3]
        assert drawn[:4] == drawn[4:]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
async def test_log_probabilities_that_are_no_numbers_never_leave(value: float) -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.log_prob = value
        await b.ask(group(3))
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason, refusal.deliveries) == (3, "not_finite", 1)
        assert "v0@0000000000000000 are unusable" in refusal.message
        assert await b.broker.length(names.trajectories(RUN)) == 0


async def test_samples_that_no_reader_accepts_are_their_groups_failure() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.log_prob = 0.5
        await b.ask(group(3))
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason) == (3, "out_of_range")
        assert "a log-probability is at most 0" in refusal.message
        b.engine.log_prob = -1.0
        await b.ask(group(4))
        await b.headers(4)


async def test_a_probe_that_fails_is_an_answer() -> None:
    async with bench(limits=replace(LIMITS, group_timeout_s=0.05, lease_s=1.5)) as b:
        await b.push(V0)
        b.engine.stuck.add((5, 3))
        b.engine.errors[(5,)] = RuntimeError("no single token")
        await b.ask(group(3))
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason) == (3, "deadline")


async def test_a_validation_server_answers_only_held_out_prompts_of_its_version() -> None:
    limits = SamplerLimits.of(
        config(
            rollout__replicas=2,
            rollout__validation_servers=1,
            rollout__in_flight="keep",
            rollout__sampler="batched",
            barrier__mode="bounded",
            barrier__max_staleness=1,
            trainer__save_freq=0,
            algorithm__rollout_correction={"method": "tis"},
        ),
        validates=True,
    )
    assert (limits.mixes_versions, limits.max_staleness) == (False, 0)
    async with bench(limits=replace(LIMITS, validates=True, reports_beside=True)) as b:
        await b.push(V1)
        await b.ask(group(7, policy=V1))
        held_out = group(8, policy=V1, samples=1, purpose=Purpose.VALIDATE)
        unusable = replace(held_out, prompt_id=9, policy=replace(V1, digest="f" * 16))
        stream = names.val_prompts(RUN, 1)
        for asked in (held_out, unusable):
            await b.broker.append([Outgoing(stream=stream, payload=encode_prompt_group(asked))])
        (header,) = await b.headers(1)
        assert (header.trajectory_id.prompt_id, header.policy) == (8, V1)
        refused = await b.broker.read_log(names.val_scored(RUN, 1), after="0-0", max_entries=9, block_s=60)
        assert len(refused) == 1
        await b.server.forget()
        assert await b.left_over(1) == 1
