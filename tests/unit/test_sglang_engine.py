"""Requests, ends and pushes of SGLang as an engine, beside a link that a test answers."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import InvalidMessageError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import EnginePart, LocalPart
from paceline.core.samples.trajectory import FinishReason, SamplingSpec
from paceline.rollout.engines.base import SampleRequest
from paceline.weights.digest.agreement import DigestReport, SliceDigest
from paceline.weights.geometry.boxes import Box
from paceline.weights.receipt import PushReceipt

pytestmark = pytest.mark.torch


class SglangParams(SimpleNamespace):
    """Sampling parameters as SGLang keeps them: it replaces a temperature of 0."""

    def normalize(self, _: Any) -> None:
        assert self.temperature > 0


@dataclass
class AnsweredLink:
    """Records messages and calls; `idle`: whether nothing is under way, by question, the last for good."""

    sent: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    idle: list[bool] = field(default_factory=lambda: [True])
    ended: list[int] = field(default_factory=list)
    silent: bool = False

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[dict[str, Any]]:
        if self.silent:
            await asyncio.Event().wait()
        self.calls.append(method)
        idle = self.idle.pop(0) if len(self.idle) > 1 else self.idle[0]
        return [{"idle": idle, "receipt": RECEIPT, "freed_bytes": 5}]

    def kill(self) -> None:
        self.calls.append("kill")


PART = SliceDigest(name="w", global_shape=(1,), box=Box((0,), (1,)), value=3)
RECEIPT = PushReceipt(
    version=4,
    reports=(DigestReport.of(rank="r", version=4, slices=(PART,)),),
    num_bytes=4,
    relayed_bytes=0,
    transfer_ms=1.0,
    digest_ms=1.0,
    peak_extra_bytes=8,
).to_bytes()


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine imports of SGLang to speak with it."""
    messages, params = ModuleType("io_struct"), ModuleType("sampling_params")
    messages.TokenizedGenerateReqInput = type("TokenizedGenerateReqInput", (SimpleNamespace,), {})  # type: ignore[attr-defined]
    messages.AbortReq = type("AbortReq", (SimpleNamespace,), {})  # type: ignore[attr-defined]
    params.SamplingParams = SglangParams  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.sampling"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setitem(sys.modules, "sglang.srt.sampling.sampling_params", params)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    from paceline.rollout.engines.sglang import engine as module

    monkeypatch.setattr(module, "Link", lambda _: AnsweredLink())
    monkeypatch.setattr(module, "_DRAIN_S", 0.5)
    tree = {
        "data": {"train_files": "x.parquet", "max_prompt_length": 8, "max_response_length": 8},
        "model": {"path": "some/model"},
        "rollout": {"name": "sglang"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1},
    }
    made = module.SglangEngine(parse(RunConfig, tree))
    made._facts = {"vocab_size": 100, "kv_cache_tokens": 1000}
    return made


def request(name: str = "r", **spec: Any) -> SampleRequest:
    sampling = SamplingSpec(**{"temperature": 0.5, "max_tokens": 3, "stop_token_ids": (7,), **spec})
    return SampleRequest(
        request_id=name, prompt_token_ids=[1, 2], sampling=sampling, seed=11, cache_salt="v1"
    )


def outputs(link: AnsweredLink) -> list[Any]:
    return [message for message in link.sent if type(message).__name__ == "TokenizedGenerateReqInput"]


def aborted(link: AnsweredLink) -> list[str]:
    return [message.rid for message in link.sent if type(message).__name__ == "AbortReq"]


def answer(engine: Any, name: str, token_ids: list[int], reason: dict[str, Any] | None) -> None:
    kind = type("BatchTokenIDOutput", (SimpleNamespace,), {})
    engine._take(
        kind(
            rids=[name],
            output_ids=[token_ids],
            output_token_logprobs_val=[[-0.5] * len(token_ids)],
            finished_reasons=[reason],
        )
    )


async def begun(engine: Any, *requests: SampleRequest) -> tuple[asyncio.Task[Any], list[str], list[int]]:
    told: list[int] = []
    task = asyncio.create_task(engine.generate(list(requests), lambda: told.append(1)))
    before = len(outputs(engine._link))
    for _ in range(5):
        await asyncio.sleep(0)
    return task, [message.rid for message in outputs(engine._link)[before:]], told


async def test_a_request_says_what_sglang_must_know(engine: Any) -> None:
    task, names, _ = await begun(engine, request(), replace(request("g", temperature=0.0, top_k=5), seed=12))
    first, greedy = outputs(engine._link)
    assert (first.input_ids.tolist(), first.extra_key, first.return_logprob) == ([1, 2], "v1", True)
    params = first.sampling_params
    assert (params.temperature, params.sampling_seed, params.max_new_tokens) == (0.5, 11, 3)
    assert (params.stop_token_ids, params.top_p, params.top_k) == ({7}, 1.0, -1)
    assert (greedy.sampling_params.temperature, greedy.sampling_params.top_k) == (0.0, 5)
    assert len({*names}) == 2
    task.cancel()


async def test_tokens_are_collected_until_the_end_and_its_reason(engine: Any) -> None:
    task, (first_name, second_name), told = await begun(engine, request("1"), request("2"))
    answer(engine, second_name, [5], None)
    answer(engine, first_name, [4, 7], {"type": "stop"})
    assert told == [1]
    answer(engine, second_name, [6, 8], {"type": "length"})
    first, second = await task
    assert (first.token_ids.tolist(), first.finish_reason) == ([4, 7], FinishReason.STOP)
    assert (second.token_ids.tolist(), second.finish_reason) == ([5, 6, 8], FinishReason.LENGTH)
    assert second.log_probs.tolist() == [-0.5] * 3
    assert told == [1, 1]


async def test_a_stop_token_that_is_the_last_that_fits_ends_the_response(engine: Any) -> None:
    """SGLang says that it was cut off."""
    task, (name,), _ = await begun(engine, request())
    answer(engine, name, [5, 6, 7], {"type": "length"})
    assert (await task)[0].finish_reason is FinishReason.STOP


async def test_an_error_of_one_request_ends_the_call_at_once_and_aborts_the_others(engine: Any) -> None:
    task, (first_name, second_name), _ = await begun(engine, request("calm"), request("doomed"))
    answer(engine, second_name, [], {"type": "abort", "message": "out of memory"})
    with pytest.raises(PacelineError, match="ended request doomed with an error.*out of memory"):
        await asyncio.wait_for(task, 60)
    assert aborted(engine._link) == [first_name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_token_ids": [1] * 15}, "15 tokens and 3 to draw do not fit"),
        ({"prompt_token_ids": [100]}, "a token id is outside 0..99"),
        ({"images": [object()]}, "images are not supported"),
    ],
)
async def test_a_request_that_cannot_be_run_is_refused_before_any_is_sent(
    engine: Any, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidMessageError, match=words):
        await engine.generate([request(), replace(request("bad"), **change)])
    assert engine._link.sent == []


async def test_cancelling_waits_for_nothing_even_if_the_engine_hangs(engine: Any) -> None:
    task, (name,), told = await begun(engine, request())
    engine._link.silent = True
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert aborted(engine._link) == [name]
    answer(engine, name, [5], {"type": "abort"})
    assert told == []
    assert engine._responses == {}


async def test_cancelling_beside_an_engine_that_has_just_died_is_still_a_cancel(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _, _ = await begun(engine, request())

    async def lost(message: Any) -> None:
        raise PeerLostError("the inference engine has died", peer=LocalPart.ENGINE)

    monkeypatch.setattr(engine._link, "send", lost)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_push_waits_until_aborted_requests_have_ended_and_the_last_step_is_put_away(
    engine: Any,
) -> None:
    task, (name,), _ = await begun(engine, request())
    task.cancel()
    await asyncio.wait([task])
    engine._link.idle = [False, False, True]
    pushing = asyncio.create_task(engine.receive(4, 5.0))
    await asyncio.sleep(0.05)
    assert engine._link.calls == []
    answer(engine, name, [], {"type": "abort"})
    assert (await pushing).version == 4
    assert engine._link.calls == ["paceline_is_idle"] * 3 + ["paceline_receive"]


async def test_a_push_beside_requests_is_refused_unless_the_engine_is_paused(engine: Any) -> None:
    task, (name,), _ = await begun(engine, request())
    engine._link.idle = [False]
    with pytest.raises(WeightSyncError, match="version 4 arrived while requests were running"):
        await engine.receive(4, 5.0)
    await engine.pause(recompute=False)
    assert (await engine.receive(4, 5.0)).version == 4
    await engine.resume()
    answer(engine, name, [5, 7], {"type": "stop"})
    assert len(await task) == 1


async def test_sleep_aborts_what_is_under_way_and_is_ordered_once(engine: Any) -> None:
    task, (name,), _ = await begun(engine, request())
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0.05)
    assert aborted(engine._link) == [name]
    assert "paceline_sleep" not in engine._link.calls
    answer(engine, name, [5], {"type": "abort"})
    assert await sleeping == 5
    assert (await task)[0].finish_reason is FinishReason.ABORT
    await engine.sleep()
    await engine.wake(EnginePart.WEIGHTS)
    await engine.wake(EnginePart.WEIGHTS)
    assert engine._link.calls.count("paceline_sleep") == 1
    assert engine._link.calls.count("paceline_wake") == 1


async def test_a_dead_engine_ends_what_is_under_way_and_answers_nothing(engine: Any) -> None:
    task, _, told = await begun(engine, request())
    watching = asyncio.create_task(engine._watch())
    engine._link.ended = [-9]
    with pytest.raises(PeerLostError, match=r"has died \(exit codes \[-9\]\)") as caught:
        await asyncio.wait_for(task, 60)
    assert caught.value.peer is LocalPart.ENGINE
    assert told == []
    await watching
    with pytest.raises(PeerLostError, match="has died"):
        await engine.describe()
    with pytest.raises(PeerLostError, match="has died"):
        await engine.check_health()
    link = engine._link
    await engine.shutdown()
    await engine.shutdown()
    assert link.calls == ["kill"]
