"""An engine without a model: tokens follow from seed, prompt and weights; every call is an event.

It passes the contract suite of `tests/contract/test_engine.py`, there with real `RankReceiver`s for ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from paceline.core.errors import InvalidMessageError, PacelineError, PeerLostError, WeightSyncError
from paceline.core.members import EnginePart
from paceline.core.samples.trajectory import FinishReason
from paceline.rollout.engines.base import Engine, Sample, SampleRequest, do_nothing
from paceline.weights.digest.agreement import DigestReport, SliceDigest, model_digest
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

Event = tuple[str, Any]


class Rank(Protocol):
    """What the engine needs of each rank; `RankReceiver` has it."""

    def describe(self) -> RankLayout: ...
    def join(self, spec: WeightGroupSpec, rank: int, timeout_s: float) -> None: ...
    def receive(self, version: int, timeout_s: float) -> PushReceipt: ...
    def digest(self, version: int, rank_name: str) -> DigestReport: ...
    def leave(self) -> None: ...


class PaperRank:
    """A rank with one row of a tensor, whose pushes arrive at once and without a learner."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks, self._version = rank, num_ranks, 0

    def describe(self) -> RankLayout:
        box = Box((self._rank,), (self._rank + 1,))
        part = TensorSlice(name="w", global_shape=(self._num_ranks,), box=box, param="w", offset=(0,))
        return RankLayout(dtype="float32", slices=(part,))

    def join(self, spec: WeightGroupSpec, rank: int, timeout_s: float) -> None: ...

    def receive(self, version: int, timeout_s: float) -> PushReceipt:
        self._version = version
        return PushReceipt(
            version=version,
            reports=(self.digest(version, f"rollout rank {self._rank}"),),
            num_bytes=4,
            relayed_bytes=0,
            transfer_ms=1.0 + self._rank,
            digest_ms=0.5,
            peak_extra_bytes=8,
        )

    def digest(self, version: int, rank_name: str) -> DigestReport:
        box = Box((self._rank,), (self._rank + 1,))
        part = SliceDigest(name="w", global_shape=(self._num_ranks,), box=box, value=self._version)
        return DigestReport.of(rank=rank_name, version=version, slices=(part,))

    def leave(self) -> None: ...


class FakeEngine(Engine):
    """Implements `Engine`.

    `events` has what happened, in order: ("generate", prompt ids) once per group, ("abort", prompt ids),
    ("join", epoch), ("receive", version), ("sleep", None), ("wake", part), ("leave", None),
    ("shutdown", None). `hold()` makes generation wait until `release()`. A prompt in `errors` fails with its
    error, one in `stuck` does not end.

    Args:
        ranks: what the weights go through; by default `num_ranks` of `PaperRank`.
        max_model_len: prompts of so many tokens are refused.
        token_s: time that a token takes.
        continues: whether samples may go on from tokens that were drawn before.
    """

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        vocab_size: int = 64,
        ranks: Sequence[Rank] | None = None,
        max_model_len: int = 1 << 20,
        token_s: float = 0.0,
        continues: bool = True,
    ) -> None:
        self._continues = continues
        self._requests: dict[str, SampleRequest] = {}
        self._num_held = 0
        self.num_drawn = 0
        self._vocab_size, self._max_model_len, self._token_s = vocab_size, max_model_len, token_s
        self._ranks = ranks or [PaperRank(rank, num_ranks) for rank in range(num_ranks)]
        self._weights = 0
        self.events: list[Event] = []
        self.failure: Exception | None = None
        self.push_failure: Exception | None = None
        self.log_prob = -1.0
        self.errors: dict[tuple[int, ...], Exception] = {}
        self.stuck: set[tuple[int, ...]] = set()
        self.max_under_way = 0
        self._under_way = 0
        self._open = asyncio.Event()
        self._open.set()
        self._stirred = asyncio.Event()
        self._failed: set[str] = set()
        self._version = -1
        self._going = asyncio.Event()
        self._going.set()
        self._drawn: dict[str, int] = {}
        self._draws: dict[str, list[tuple[int, int, int]]] = {}
        self.asleep: set[EnginePart] = set()
        self.freed_bytes = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def kv_cache_tokens(self) -> int:
        return 2**20

    def hold(self, num_tokens: int = 0) -> None:
        """Generation begins but does not end: after so many tokens of each sample, or all that it has."""
        self._open.clear()
        self._num_held = num_tokens

    def draw_to(self, num_tokens: int) -> None:
        """Held samples have drawn so many tokens by now."""
        self._drawn.update(dict.fromkeys(self._drawn, num_tokens))

    def release(self) -> None:
        """It ends."""
        self._open.set()

    def die(self) -> None:
        """From now on every call but `shutdown` raises PeerLostError."""
        self.failure = PeerLostError("the fake engine has died", peer="engine")
        self._stirred.set()

    def fail(self, request_id: str) -> None:
        """A request that is under way ends with an error."""
        self._failed.add(request_id)
        self._stirred.set()

    def named(self, name: str) -> list[Any]:
        """What came with the events of a name."""
        return [what for kind, what in self.events if kind == name]

    async def describe(self) -> tuple[RankLayout, ...]:
        self._check_alive()
        return tuple(rank.describe() for rank in self._ranks)

    async def join(self, spec: WeightGroupSpec, rank_offset: int, timeout_s: float) -> None:
        self._check_alive()
        self.events.append(("join", spec.epoch))
        await _on_all(
            lambda rank=rank, number=rank_offset + number: rank.join(spec, number, timeout_s)
            for number, rank in enumerate(self._ranks)
        )

    async def receive(self, version: int, timeout_s: float) -> PushReceipt:
        self._check_alive()
        self.events.append(("receive", version))
        if self.push_failure is not None:
            raise self.push_failure
        if EnginePart.WEIGHTS in self.asleep:
            raise WeightSyncError(f"version {version} arrived while the engine was asleep")
        receipts = await _on_all(lambda rank=rank: rank.receive(version, timeout_s) for rank in self._ranks)
        if self._under_way and self._going.is_set():
            raise WeightSyncError(f"version {version} arrived while requests were running")
        receipt = PushReceipt.merge(receipts)
        self._weights, self._version = model_digest(receipt.reports), version
        for request_id, draws in self._draws.items():
            if draws[-1][0] == self._drawn[request_id]:
                draws.pop()
            if not draws or draws[-1][1] != version:
                draws.append((self._drawn[request_id], version, self._weights))
        return receipt

    async def pause(self, *, recompute: bool) -> None:
        self._check_alive()
        self.events.append(("pause", recompute))
        self._going.clear()

    async def resume(self) -> None:
        self._check_alive()
        self.events.append(("resume", None))
        self._going.set()

    async def digest(self, version: int) -> tuple[DigestReport, ...]:
        self._check_alive()
        return tuple(rank.digest(version, f"rank {number}") for number, rank in enumerate(self._ranks))

    async def leave(self) -> None:
        self._check_alive()
        self.events.append(("leave", None))
        for rank in self._ranks:
            rank.leave()

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Samples that follow from seed, prompt, pixels and weights."""
        for request in requests:
            if len(request.prompt_token_ids) + len(request.drawn) >= self._max_model_len:
                raise InvalidMessageError(
                    f"the engine refuses request {request.request_id}: the prompt is too long",
                    reason="refused_by_engine",
                )
        prompt = tuple(requests[0].prompt_token_ids)
        self.events.append(("generate", prompt))
        if self.asleep:
            raise PeerLostError("a sleeping engine was asked for samples", peer="engine")
        self._under_way += len(requests)
        self.max_under_way = max(self.max_under_way, self._under_way)
        try:
            ids = {request.request_id for request in requests}
            self._requests |= {request.request_id: request for request in requests}
            num_drawn = 0 if self._open.is_set() else self._num_held
            for request_id in ids:
                self._drawn[request_id], self._draws[request_id] = (
                    num_drawn,
                    [(0, self._version, self._weights)],
                )
            lengths = [len(self._rest(request).token_ids) for request in requests]
            await self._open.wait()
            if prompt in self.stuck:
                await asyncio.Event().wait()
            if prompt in self.errors:
                raise self.errors[prompt]
            await self._pass_time(max(lengths), ids)
            self._check_alive()
            samples = [self._composed(request) for request in requests]
            self.num_drawn += sum(len(sample.token_ids) for sample in samples)
        except asyncio.CancelledError:
            self.events.append(("abort", prompt))
            raise
        finally:
            self._under_way -= len(requests)
            for request in requests:
                self._drawn.pop(request.request_id, None)
                self._draws.pop(request.request_id, None)
                self._requests.pop(request.request_id, None)
        for _ in requests:
            ended()
        return samples

    async def _pass_time(self, num_tokens: int, request_ids: set[str]) -> None:
        """Token by token, but in one go where tokens take no time."""
        await asyncio.sleep(0)
        for drawn in range(1, num_tokens + 1) if self._token_s else ():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._token_s):
                    while self.failure is None and not self._failed & request_ids:
                        self._stirred.clear()
                        await self._stirred.wait()
            await self._going.wait()
            self._drawn.update(dict.fromkeys(request_ids, drawn))
            if self.failure is not None or self._failed & request_ids:
                break
        await self._going.wait()
        for request_id in self._failed & request_ids:
            self._failed.remove(request_id)
            raise PacelineError(f"the engine has ended request {request_id} with an error")

    def _composed(self, request: SampleRequest) -> Sample:
        """The first weights' sample; after a push in mid-answer with the tokens that later weights draw."""
        draws, weights = self._draws[request.request_id], self._weights
        samples = []
        for _, _, self._weights in draws:
            samples.append(self._rest(request))
        self._weights = weights
        token_ids = samples[0].token_ids.copy()
        begins = [(first, version) for first, version, _ in draws if first < len(token_ids)]
        for (first, _), later in zip(begins[1:], samples[1:], strict=False):
            end = min(len(later.token_ids), len(token_ids) - 1)
            token_ids[first:end] = later.token_ids[first:end]
        return replace(samples[0], token_ids=token_ids, versions=tuple(begins))

    @property
    def continues(self) -> bool:
        return self._continues

    async def drawn(self, wanted: Mapping[str, int]) -> dict[str, Sample]:
        self._check_alive()
        parts = {}
        for request_id, first in wanted.items():
            if request_id not in self._requests:
                continue
            sample, end = self._composed(self._requests[request_id]), self._drawn[request_id]
            begins = {max(0, begin - first): version for begin, version in sample.versions if begin < end}
            if len(sample.token_ids[first:end]):
                parts[request_id] = Sample(
                    token_ids=sample.token_ids[first:end],
                    log_probs=sample.log_probs[first:end],
                    finish_reason=FinishReason.ABORT if end < len(sample.token_ids) else sample.finish_reason,
                    versions=tuple(begins.items()),
                )
        return parts

    def _rest(self, request: SampleRequest) -> Sample:
        """What follows the tokens that were drawn before; with other weights, at least one token."""
        sample = self.sample(request)
        first = min(len(request.drawn), len(sample.token_ids) - 1)
        return replace(sample, token_ids=sample.token_ids[first:], log_probs=sample.log_probs[first:])

    def sample(self, request: SampleRequest) -> Sample:
        """What the engine draws for a request from its first token on, with the present weights."""
        spec = request.sampling
        seed = request.seed if spec.temperature > 0 else 0
        pictures = [int(image.pixels.view(np.uint32).sum(dtype=np.uint64)) for image in request.images]
        rng = np.random.default_rng([seed, self._weights, *request.prompt_token_ids, *pictures])
        stops = list(spec.stop_token_ids)
        # About half of the samples run to their full length.
        count = min(int(rng.integers(1, 2 * spec.max_tokens)), spec.max_tokens) if stops else spec.max_tokens
        others = np.setdiff1d(np.arange(self._vocab_size, dtype=np.int32), np.array(stops, np.int32))
        token_ids = rng.choice(others, count)
        reason = FinishReason.LENGTH
        if count < spec.max_tokens:
            token_ids[-1], reason = rng.choice(stops), FinishReason.STOP
        log_probs = (self.log_prob - token_ids / 1024).astype(np.float32)
        return Sample(token_ids=token_ids, log_probs=log_probs, finish_reason=reason)

    async def sleep(self) -> int:
        self._check_alive()
        self.events.append(("sleep", None))
        self.asleep = set(EnginePart)
        return self.freed_bytes

    async def wake(self, part: EnginePart) -> None:
        self._check_alive()
        self.events.append(("wake", part))
        self.asleep.discard(part)

    async def check_health(self) -> None:
        self._check_alive()

    async def shutdown(self) -> None:
        self.events.append(("shutdown", None))

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure


async def _on_all(calls: Any) -> list[Any]:
    """Runs one call per rank, each in a thread; raises the first error once all have ended."""
    results = await asyncio.gather(*(asyncio.to_thread(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
