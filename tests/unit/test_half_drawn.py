"""Samples that are half drawn when their server leaves or dies: another one goes on with them, to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.broker import Outgoing, names
from paceline.broker.base import SavedPart
from paceline.core.errors import BrokerError, PeerLostError
from paceline.core.policy import PolicyRange, PolicyTag, range_fault
from paceline.core.samples.trajectory import PartialSample, PromptGroup, SamplingSpec
from paceline.rollout.engines.base import SampleRequest
from paceline.service.observability import metrics, telemetry
from paceline.wire import decode_progress, encode_progress, encode_prompt_group
from support.fake_engine import FakeEngine
from support.memory_broker import MemoryBroker, MemoryStore
from support.rollout_bench import LIMITS, RUN, V0, V1, Bench, bench, group, weight_group_spec

SPEC = SamplingSpec(temperature=1.0, max_tokens=40)
OFTEN = replace(LIMITS, save_progress_s=0.02)
MIXING = replace(OFTEN, in_flight="keep", max_staleness=1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What was counted, by metric."""
    sums: dict[str, float] = {}

    def count(metric: metrics.Metric, amount: float = 1, **_: str) -> None:
        sums[metric.name] = sums.get(metric.name, 0) + amount

    monkeypatch.setattr(telemetry, "count", count)
    return sums


def wanted(prompt_id: int = 7, **changes: Any) -> PromptGroup:
    return replace(group(prompt_id), **{"sampling": SPEC} | changes)


async def undisturbed(of: PromptGroup) -> list[tuple[str, str]]:
    """Ids and digests of the blobs of a group that one server draws without a break."""
    async with bench() as b:
        await b.push(of.policy)
        await b.ask(of)
        return sorted([(str(h.trajectory_id), h.blob_digest) for h in await b.headers(of.num_samples)])


async def delivered(b: Bench, of: PromptGroup) -> list[tuple[str, str]]:
    return sorted([(str(h.trajectory_id), h.blob_digest) for h in await b.headers(of.num_samples)])


def saved(broker: MemoryBroker) -> list[bytes]:
    """What is saved of entries that are not acknowledged."""
    groups = [g for stream in broker._store.streams.values() for g in stream.groups.values()]
    return [pending.progress for g in groups for pending in g.pending.values() if pending.progress]


async def until_saved(broker: MemoryBroker, num_tokens: int) -> None:
    async with asyncio.timeout(60):
        while True:
            samples = [part for data in saved(broker) for part in decode_progress(data).values()]
            if samples and all(part.end >= num_tokens for part in samples):
                return
            await asyncio.sleep(0.005)


async def test_a_server_that_is_drained_hands_over_what_it_has_and_another_goes_on(
    counted: dict[str, float],
) -> None:
    of, broker = wanted(), MemoryBroker()
    async with bench(broker=broker) as a, bench(broker=broker, name="rollout-1") as b:
        await a.push(V0)
        a.engine.hold(13)
        await a.ask(of)
        await a.quiet(1)
        async with asyncio.timeout(60):
            await a.server.drain()
        assert a.engine.named("abort") == [(5, 7)]
        assert a.server.in_flight == 0
        assert saved(broker)
        await b.push(V0)
        assert await delivered(b, of) == await undisturbed(of)
        assert b.engine.num_drawn == 4 * (40 - 13)
        assert saved(broker) == []
        assert await b.left_over(0) == 0
    assert counted[metrics.TOKENS_CARRIED_OVER.name] == 4 * 13
    assert counted[metrics.PROGRESS_SAVED.name] > 4 * 13 * 8


async def test_what_a_server_that_dies_has_saved_is_not_drawn_again() -> None:
    """Killed: its broker answers no call any more, and gives nothing back."""
    of, store = wanted(), MemoryStore()

    class Killed(MemoryBroker):
        dead = False

        async def release(self, *args: Any) -> None:
            if self.dead:
                raise BrokerError("killed")
            await super().release(*args)

    broker_of_a = Killed(store=store)
    engine = FakeEngine(token_s=0.003)
    with pytest.raises((BrokerError, PeerLostError)):
        async with bench(broker=broker_of_a, engine=engine, limits=OFTEN) as a:
            await a.push(V0)
            await a.ask(of)
            await until_saved(broker_of_a, 5)
            broker_of_a.dead = True
            engine.die()
            await asyncio.sleep(120)  # the end of the service breaks it off
    broker = MemoryBroker(store=store)
    for pending in store.streams[names.prompts(RUN, 0)].groups[names.ROLLOUT_GROUP].pending.values():
        pending.last_sign_s = float("-inf")  # its lease lapses
    async with bench(broker=broker, name="rollout-1") as b:
        await b.push(V0)
        assert await delivered(b, of) == await undisturbed(of)
        assert b.engine.num_drawn <= 4 * (40 - 5)
        assert saved(broker) == []


@pytest.mark.parametrize("seed", range(20))
async def test_samples_cut_at_random_places_by_many_servers_are_those_of_one(seed: int) -> None:
    """Servers come and go; what some had since they last saved is lost with them."""
    rng = random.Random(seed)
    spec = replace(SPEC, temperature=rng.choice([0.0, 1.0]), stop_token_ids=rng.choice([(), (1, 2)]))
    of = wanted(sampling=spec, seeds=tuple(rng.randrange(2**31) for _ in range(3)))
    broker, reached = MemoryBroker(), 0
    limits = replace(LIMITS, save_progress_s=rng.choice([0.0, 0.005]), max_deliveries=1000)
    for number in range(rng.randint(1, 6)):
        async with bench(broker=broker, name=f"rollout-{number}", limits=limits) as a:
            await a.push(V0)
            a.engine.hold(rng.randint(0, 8))
            if not number:
                await a.ask(of)
            await a.quiet(1)
            await asyncio.sleep(rng.choice([0, 0.02]))
            if rng.random() < 0.3:  # as if it died: it saves no more
                a.engine.failure = PeerLostError("gone", peer="engine")
            else:
                reached += a.engine._num_held
            await (a.server.drain() if rng.random() < 0.5 else a.sampler.close())
            a.engine.failure = None
    async with bench(broker=broker, name="last", limits=limits) as b:
        await b.push(V0)
        assert await delivered(b, of) == await undisturbed(of)
        num_tokens = sum(len(b.engine.sample(request).token_ids) for request in requests_of(of))
        assert num_tokens - b.engine.num_drawn >= min(reached, num_tokens) * (not of.sampling.stop_token_ids)
        assert saved(broker) == []


def requests_of(of: PromptGroup) -> list[SampleRequest]:
    return [
        SampleRequest(
            request_id=str(index),
            prompt_token_ids=of.prompt_token_ids.tolist(),
            sampling=of.sampling,
            seed=seed,
        )
        for index, seed in enumerate(of.seeds)
    ]


async def test_samples_that_had_ended_are_not_drawn_again() -> None:
    of, broker = wanted(sampling=replace(SPEC, stop_token_ids=(1, 2))), MemoryBroker()
    async with bench(broker=broker) as a, bench(broker=broker, name="rollout-1") as b:
        await a.push(V0)
        lengths = sorted(len(a.engine.sample(request).token_ids) for request in requests_of(of))
        a.engine.hold(lengths[2])
        await a.ask(of)
        await a.quiet(1)
        await a.server.drain()
        await b.push(V0)
        b.engine.hold()
        await b.quiet(1)
        num_ended = sum(length <= lengths[2] for length in lengths)
        assert 3 <= num_ended < 4, "choose other lengths"
        assert b.server.in_flight == 4 - num_ended
        b.engine.release()
        assert await delivered(b, of) == await undisturbed(of)


# --- what cannot be used

Spoil = Callable[[PartialSample], PartialSample]


def tagged(policy: PolicyTag) -> Spoil:
    return lambda part: replace(part, ranges=(PolicyRange(policy, part.first, part.end),))


def with_stop(part: PartialSample) -> PartialSample:
    token_ids = part.token_ids.copy()
    token_ids[1] = 63
    return replace(part, token_ids=token_ids)


SPOILT: dict[str, tuple[Spoil, str]] = {
    "another digest": (tagged(PolicyTag(version=0, digest="f" * 16)), "version 0 is v0@0000000000000000"),
    "newer weights": (tagged(V1), "this server holds v0@0000000000000000, but v1@1111111111111111 drew"),
    "another seed": (lambda part: replace(part, seed=part.seed + 1), "are not those of sample 0"),
    "no such sample": (lambda part: replace(part, sample_index=9), "are not those of sample 9"),
    "a stop within": (with_stop, "go on after its end"),
    "a token beyond the vocabulary": (
        lambda part: replace(part, token_ids=part.token_ids + 64),
        "response_token_ids holds the id",
    ),
    "a hole": (
        lambda part: replace(part, first=1, ranges=(PolicyRange(V0, 1, part.end + 1),)),
        "sample 0 does not continue at 1",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
async def test_what_does_not_fit_is_left_and_the_group_is_drawn_from_its_first_token_on(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, words = SPOILT[kind]
    of, broker = wanted(sampling=replace(SPEC, stop_token_ids=(63,))), MemoryBroker()
    part = PartialSample(
        sample_index=0,
        seed=of.seeds[0],
        first=0,
        token_ids=np.arange(5, dtype=np.int32),
        log_probs=np.full(5, -1.0, np.float32),
        ranges=(PolicyRange(V0, 0, 5),),
    )
    await leave(broker, of, encode_progress([spoil(part)]))
    async with bench(broker=broker) as b:
        await b.push(V0)
        assert await delivered(b, of) == await undisturbed(of)
        assert words in caplog.text
        assert b.engine.num_drawn == sum(len(b.engine.sample(r).token_ids) for r in requests_of(of))


async def leave(broker: MemoryBroker, of: PromptGroup, data: bytes) -> None:
    """Somebody takes the group, saves this and goes."""
    stream = names.prompts(RUN, of.policy.version)
    await broker.ensure_group(stream, names.ROLLOUT_GROUP)
    async with bench(broker=broker) as b:
        await b.ask(of)
    where = (stream, names.ROLLOUT_GROUP, "other")
    (entry,) = await broker.read(*where, max_entries=1, block_s=0)
    await broker.save_progress(*where, [SavedPart(entry_id=entry.entry_id, offset=0, data=data)])
    await broker.release(*where, [entry.entry_id])


@pytest.mark.parametrize("data", [b"x", b"\x05\0\0\0abcde", b"\xff\xff\xff\xff", b"\0\0\0\0"])
async def test_torn_bytes_cost_no_group(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    of, broker = wanted(), MemoryBroker()
    await leave(broker, of, data)
    async with bench(broker=broker) as b:
        await b.push(V0)
        assert await delivered(b, of) == await undisturbed(of)
    assert "prompt 7 is drawn from its first token on: invalid" in caplog.text


async def test_a_group_that_is_begun_anew_saves_in_place_of_what_did_not_fit() -> None:
    of, broker = wanted(), MemoryBroker()
    await leave(broker, of, b"x" * 5000)
    async with bench(broker=broker, limits=OFTEN) as a:
        await a.push(V0)
        a.engine.hold(6)
        await a.quiet(1)
        await a.server.drain()
        (data,) = saved(broker)
        assert [part.end for part in decode_progress(data).values()] == [6] * 4


# --- pushes in mid-answer


async def ask_mixed(b: Bench, of: PromptGroup) -> None:
    await b.broker.append([Outgoing(stream=names.prompts(RUN, None), payload=encode_prompt_group(of))])


async def test_tokens_of_an_older_version_within_the_bound_keep_their_version() -> None:
    of, broker = wanted(step=2), MemoryBroker()
    async with (
        bench(broker=broker, limits=MIXING) as a,
        bench(broker=broker, limits=MIXING, name="rollout-1") as b,
    ):
        await a.push(V0)
        a.engine.hold(9)
        await ask_mixed(a, of)
        await a.quiet(1)
        await a.server.drain()
        await b.push(V1)  # it has never had the version before
        headers = await b.headers(4)
        for header in headers:
            assert [(p.policy, p.first, p.end) for p in header.ranges] == [(V0, 0, 9), (V1, 9, 40)]
            trajectory = await b.blob(header)
            assert (trajectory.policy, trajectory.ranges) == (V0, header.ranges)
            assert range_fault(header.ranges, header.num_response_tokens) == ""
        old, new = FakeEngine(), b.engine
        await old.receive(0, 1.0)
        for request, header in zip(
            requests_of(of), sorted(headers, key=lambda h: h.trajectory_id), strict=True
        ):
            token_ids = (await b.blob(header)).response_token_ids
            assert token_ids[:9].tolist() == old.sample(request).token_ids[:9].tolist()
            assert token_ids[9:].tolist() == new.sample(request).token_ids[9:].tolist()


async def test_a_push_in_mid_answer_and_then_a_drain_leave_both_versions() -> None:
    of, broker = wanted(step=2), MemoryBroker()
    async with (
        bench(broker=broker, limits=MIXING) as a,
        bench(broker=broker, limits=MIXING, name="rollout-1") as b,
    ):
        await a.push(V0)
        a.engine.hold(3)
        await ask_mixed(a, of)
        await until_saved(broker, 3)
        await a.push(V1)
        a.engine.draw_to(5)
        await a.server.drain()
        (data,) = saved(broker)
        for part in decode_progress(data).values():
            assert [(r.policy, r.first, r.end) for r in part.ranges] == [(V0, 0, 3), (V1, 3, 5)]
            assert range_fault(part.ranges, part.end) == ""
        await b.push(V1)
        assert {tuple(p.policy for p in h.ranges) for h in await b.headers(4)} == {(V0, V1)}


async def test_a_server_that_is_behind_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    of, broker = wanted(step=2), MemoryBroker()
    async with (
        bench(broker=broker, limits=MIXING) as a,
        bench(broker=broker, limits=MIXING, name="rollout-1") as b,
    ):
        await a.push(V1)
        a.engine.hold(9)
        await ask_mixed(a, of)
        await a.quiet(1)
        await a.server.drain()
        await b.push(V0)
        assert {(h.policy, h.ranges) for h in await b.headers(4)} == {(V0, ())}
    assert "it needs v0@0000000000000000 or newer; this server holds" in caplog.text


# --- what is saved, and when


@pytest.mark.parametrize(
    ("limits", "engine", "of"),
    [
        (replace(LIMITS, save_progress_s=0.0), FakeEngine(), wanted()),
        (replace(LIMITS, save_progress_s=30.0), FakeEngine(), wanted()),
        (OFTEN, FakeEngine(continues=False), wanted()),
    ],
    ids=["never", "too young", "an engine that cannot go on"],
)
async def test_nothing_is_saved_of_groups_that_are_not_worth_it(
    limits: Any, engine: FakeEngine, of: PromptGroup
) -> None:
    async with bench(limits=limits, engine=engine) as b:
        await b.push(V0)
        engine.hold(9)
        await b.ask(of)
        await b.quiet(1)
        await asyncio.sleep(0.1)
        assert saved(b.broker) == []
        engine.release()
        assert await delivered(b, of) == await undisturbed(of)


async def test_groups_that_have_just_begun_are_left_out() -> None:
    async with bench() as b:
        await b.push(V0)
        b.engine.hold(9)
        await b.ask(wanted())
        await b.quiet(1)
        await b.sampler._progress._save(least_age_s=1000.0)
        assert saved(b.broker) == []
        await b.sampler._progress._save(least_age_s=0.0)
        assert len(saved(b.broker)) == 1


async def test_a_save_has_only_what_came_since_the_last_one() -> None:
    of, frames = wanted(), list[bytes]()

    class Noting(MemoryBroker):
        async def save_progress(self, *args: Any) -> list[str]:
            frames.extend(part.data for part in args[3])
            return await super().save_progress(*args)

    async with bench(limits=OFTEN, engine=FakeEngine(token_s=0.01), broker=Noting()) as b:
        await b.push(V0)
        await b.ask(of)
        await until_saved(b.broker, 8)
        (data,) = saved(b.broker)
        assert b"".join(frames) == data
        assert len(frames) > 2
        assert await delivered(b, of) == await undisturbed(of)


async def test_a_broker_that_is_away_for_a_save_is_told_the_next_time() -> None:
    of, calls = wanted(), list[int]()

    class Flaky(MemoryBroker):
        async def save_progress(self, *args: Any) -> list[str]:
            calls.append(len(calls))
            if len(calls) % 3 == 1:
                raise BrokerError("away")
            stored = await super().save_progress(*args)
            if len(calls) % 3 == 2:
                raise BrokerError("the answer was lost")
            return stored

    broker = Flaky()
    async with bench(limits=OFTEN, engine=FakeEngine(token_s=0.01), broker=broker) as a:
        await a.push(V0)
        await a.ask(of)
        await until_saved(broker, 8)
        calls.extend([0] * (-len(calls) % 3 + 2))  # the last one succeeds
        await a.server.drain()
    async with bench(broker=broker, name="rollout-1") as b:
        await b.push(V0)
        assert await delivered(b, of) == await undisturbed(of)


async def test_a_group_of_another_owner_is_not_saved_over() -> None:
    """This server's lease has lapsed unnoticed."""
    of, tried = wanted(), list[bytes]()

    class Noting(MemoryBroker):
        async def save_progress(self, *args: Any) -> list[str]:
            tried.extend(part.data for part in args[3])
            return await super().save_progress(*args)

    async with bench(limits=OFTEN, broker=Noting(), engine=FakeEngine(token_s=0.01)) as b:
        await b.push(V0)
        await b.ask(of)
        await b.quiet(1)
        where = (names.prompts(RUN, 0), names.ROLLOUT_GROUP, "other")
        (entry,) = await b.broker.reclaim(*where, min_idle_s=0, max_entries=9)
        own = [SavedPart(entry_id=entry.entry_id, offset=0, data=b"other's")]
        await b.broker.save_progress(*where, own)
        tried.clear()
        await asyncio.sleep(0.2)
        await b.server.drain()
        assert saved(b.broker) == [b"other's"]
        assert len(tried) == 1  # then it knows


async def test_a_group_that_was_handed_over_often_is_refused_only_when_its_attempts_are_used_up() -> None:
    of, broker = wanted(), MemoryBroker()
    for number in range(LIMITS.max_deliveries):
        async with bench(broker=broker, name=f"rollout-{number}") as a:
            await a.push(V0)
            a.engine.hold(3)
            if not number:
                await a.ask(of)
            await a.quiet(1)
            await a.server.drain()
            assert await broker.length(names.scored(RUN)) == 0
    (data,) = saved(broker)
    assert [part.end for part in decode_progress(data).values()] == [9] * 4


async def test_a_group_that_took_too_long_goes_on_where_it_was() -> None:
    of = wanted()
    limits = replace(OFTEN, group_timeout_s=0.5, max_deliveries=500, lease_s=0.5)
    async with bench(limits=limits, engine=FakeEngine(token_s=0.02)) as b:
        await b.push(V0)
        await b.ask(of)
        assert await delivered(b, of) == await undisturbed(of)
        assert len(b.engine.named("generate")) > 2


async def test_log_probs_that_are_no_numbers_are_not_saved() -> None:
    async with bench(limits=OFTEN) as b:
        await b.push(V0)
        b.engine.log_prob = float("nan")
        b.engine.hold(9)
        await b.ask(wanted())
        await b.quiet(1)
        await asyncio.sleep(0.1)
        assert saved(b.broker) == []


async def test_a_forgotten_server_goes_on_with_its_own_after_the_next_push() -> None:
    of = wanted()
    async with bench() as b:
        await b.push(V0)
        b.engine.hold(11)
        await b.ask(of)
        await b.quiet(1)
        await b.server.forget()
        b.engine.release()
        await b.server.join(2, weight_group_spec(), 1)
        await b.push(V0, epoch=2)
        assert await delivered(b, of) == await undisturbed(of)
        assert b.engine.num_drawn == 4 * (40 - 11)


def test_frames_come_back_as_they_were_joined() -> None:
    first = PartialSample(
        sample_index=3,
        seed=9,
        first=0,
        token_ids=np.array([1, 2], np.int32),
        log_probs=np.array([-0.5, -1.5], np.float32),
        ranges=(PolicyRange(V0, 0, 2),),
    )
    later = replace(
        first,
        first=2,
        token_ids=np.array([3, 4, 5], np.int32),
        log_probs=np.array([-1, -2, -3], np.float32),
        ranges=(PolicyRange(V0, 2, 3), PolicyRange(V1, 3, 5)),
    )
    other = replace(first, sample_index=0, seed=4)
    samples = decode_progress(encode_progress([first, other]) + encode_progress([later]))
    assert sorted(samples) == [0, 3]
    assert samples[3].token_ids.tolist() == [1, 2, 3, 4, 5]
    assert samples[3].log_probs.tolist() == [-0.5, -1.5, -1, -2, -3]
    assert samples[3].ranges == (PolicyRange(V0, 0, 3), PolicyRange(V1, 3, 5))
    assert (samples[0].end, samples[0].seed) == (2, 4)
