"""An inference engine that computes nothing: tokens follow from seed and prompt, every call is an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.core.trajectory import FinishReason
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.weights.digest.agreement import DigestReport, SliceDigest
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.receipt import PushReceipt

Event = tuple[str, Any]


class FakeEngine:
    """Implements `Engine` with `num_ranks` ranks, and the worker extension's methods on them.

    `events` holds what happened, in order: ("generate", prompt ids) once per group, ("abort", prompt ids), ("reset", None),
    ("rpc", method), ("shutdown", None). `hold()` makes generation wait until `release()`.
    """

    def __init__(self, *, num_ranks: int = 1, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.num_ranks = num_ranks
        self.events: list[Event] = []
        self.failure: Exception | None = None
        self.rpc_failure: dict[str, Any] | None = None
        self.log_prob = -1.0
        self.max_under_way = 0
        self._under_way = 0
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Generation begins but does not end."""
        self._open.clear()

    def release(self) -> None:
        """It ends."""
        self._open.set()

    def named(self, name: str) -> list[Any]:
        """What came with the events of a name."""
        return [what for kind, what in self.events if kind == name]

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Samples that follow from seed and prompt."""
        prompt = tuple(requests[0].prompt_token_ids)
        self.events.append(("generate", prompt))
        self._under_way += len(requests)
        self.max_under_way = max(self.max_under_way, self._under_way)
        try:
            await self._open.wait()
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
        except asyncio.CancelledError:
            self.events.append(("abort", prompt))
            raise
        finally:
            self._under_way -= len(requests)
        for _ in requests:
            ended()
        return [self._sample(request) for request in requests]

    def _sample(self, request: SampleRequest) -> Sample:
        rng = np.random.default_rng([request.seed, *request.prompt_token_ids])
        count = int(rng.integers(1, request.sampling.max_tokens + 1))
        full = count == request.sampling.max_tokens
        return Sample(
            token_ids=rng.integers(0, self.vocab_size, count, dtype=np.int32),
            log_probs=np.full(count, self.log_prob, np.float32),
            finish_reason=FinishReason.LENGTH if full else FinishReason.STOP,
        )

    async def reset_prefix_cache(self) -> bool:
        """False while anything is under way."""
        self.events.append(("reset", None))
        return self._under_way == 0

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """The worker extension's answers, from every rank."""
        self.events.append(("rpc", method))
        if self.rpc_failure is not None:
            return [{"error": self.rpc_failure}] * self.num_ranks
        return [self._answer(method, rank, args) for rank in range(self.num_ranks)]

    def _answer(self, method: str, rank: int, args: tuple[Any, ...]) -> dict[str, Any]:
        box = Box((rank,), (rank + 1,))
        if method == "paceline_describe":
            part = TensorSlice(name="w", global_shape=(self.num_ranks,), box=box, param="w", offset=(0,))
            return {"layout": RankLayout(dtype="float32", slices=(part,)).to_bytes()}
        if method == "paceline_receive":
            digest = SliceDigest(name="w", global_shape=(self.num_ranks,), box=box, value=args[0])
            report = DigestReport.of(rank=f"TP rank {rank}", version=args[0], slices=(digest,))
            receipt = PushReceipt(
                version=args[0],
                reports=(report,),
                num_bytes=4,
                relayed_bytes=0,
                transfer_ms=1.0 + rank,
                digest_ms=0.5,
                peak_extra_bytes=8,
            )
            return {"receipt": receipt.to_bytes()}
        return {}

    async def check_health(self) -> None:
        """Raises the failure that was set."""
        if self.failure is not None:
            raise self.failure

    async def shutdown(self) -> None:
        """Notes it."""
        self.events.append(("shutdown", None))
