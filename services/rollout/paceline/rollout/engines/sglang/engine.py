"""The engine: SGLang's schedulers in processes of their own, one per tensor-parallel rank.

Token ids go in, token ids and log-probabilities come out. SGLang's tokenizer and detokenizer processes, and
its HTTP server, are not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

from paceline.config.run import RunConfig
from paceline.core.errors import (
    DeadlineError,
    FailedStartError,
    ModelError,
    PacelineError,
    PeerLostError,
)
from paceline.core.members import EnginePart, LocalPart
from paceline.core.samples.trajectory import FinishReason
from paceline.rollout.engines.answers import Reply, engine_died
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing, refused
from paceline.rollout.engines.processes import EngineProcesses
from paceline.rollout.engines.ranked_engine import RankedEngine, merged_receipt, mixed_versions
from paceline.rollout.engines.sglang import arguments
from paceline.rollout.engines.sglang.link import Link
from paceline.rollout.engines.sglang.sampler import GREEDY
from paceline.service.ports import unused_port
from paceline.weights.receipt import PushReceipt

log = logging.getLogger(__name__)

_START_S: Final = 900.0
_SLEEP_S: Final = 30.0
_DRAIN_S: Final = 20.0
_LOOK_S: Final = 0.2
_IDLE_LOOK_S: Final = 0.002
_TAGS: Final = {EnginePart.WEIGHTS: ["weights"], EnginePart.KV_CACHE: ["kv_cache", "cuda_graph"]}
_ENDS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

_NO_ERRORS: Final = (None, "", "Aborted", "Unknown error")
"""SGLang's messages for a request that was aborted on order."""


@dataclass(slots=True)
class _Response:
    """The response to a request, as far as it has been drawn."""

    request: SampleRequest
    ended: asyncio.Future[FinishReason]
    tell: Callable[[], None] = do_nothing
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_sent: bool = False
    is_aborted: bool = False

    def fail(self, error: PacelineError) -> None:
        """Ends the response with an error that nobody has to retrieve."""
        self.ended.set_exception(error)
        self.ended.exception()

    @property
    def is_stopped(self) -> bool:
        """Whether the last token ends the response."""
        return bool(self.token_ids) and self.token_ids[-1] in self.request.sampling.stop_token_ids


class SglangEngine(RankedEngine):
    """An `Engine` over SGLang's schedulers; made by `start`. `engines/base.py` says what each promises."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(EngineProcesses())
        self._config = config
        self._link: Link | None = Link(self._take)
        self._responses: dict[str, _Response] = {}
        self._names = itertools.count()
        self._facts: Reply = {}
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RunConfig, *, load_format: str = "dummy") -> Self:
        """Starts the processes of an engine.

        Raises:
            ConfigError: rollout.engine_kwargs or rollout.temperature cannot be used.
            ModelError: the engine does not start with this model and configuration.
            FailedStartError: one of the engine's processes was killed or stopped: the next start may succeed.
        """
        started = time.monotonic()
        on_cpu = not arguments.has_gpu()
        given = arguments.server_arguments(config, on_cpu=on_cpu, load_format=load_format)
        engine = cls(config)
        assert engine._link is not None
        try:
            variables, share = arguments.environment(config), config.rollout.gpu_memory_utilization
            await asyncio.to_thread(engine._link.start, given, variables, unused_port(), share)
            facts = await engine.call_workers("paceline_facts", (), _START_S)
        except PeerLostError as error:
            engine._link.kill()
            if any(code < 0 for code in engine._link.ended):
                raise FailedStartError(
                    f"the engine did not start this time: {error}", peer="SGLang"
                ) from error
            raise ModelError(f"the engine does not start with {config.model.path}: {error}") from error
        except BaseException:
            engine._link.kill()
            raise
        engine._facts = facts[0]
        engine._processes.settle()
        engine._watching = asyncio.create_task(engine._watch())
        log.info("engine up in %.1f s", time.monotonic() - started)
        return engine

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self._facts["vocab_size"])

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return int(self._facts["kv_cache_tokens"])

    async def receive(self, version: int, timeout_s: float) -> PushReceipt:
        """Receives one push; forgets cached prefixes."""
        await self._settled()
        replies = await self.call_workers("paceline_receive", (version, timeout_s), timeout_s)
        if not self._is_paused and not all(reply["idle"] for reply in replies):
            raise mixed_versions(version)
        return merged_receipt(replies)

    async def pause(self, *, recompute: bool) -> None:
        """Lets SGLang schedule no further step."""
        await self._ordered("paceline_pause", recompute)
        self._is_paused = True

    async def resume(self) -> None:
        """Makes SGLang schedule steps again."""
        if self._is_paused:
            await self._ordered("paceline_resume")
            self._is_paused = False

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Draws all samples, in order; cancelling it aborts them."""
        messages = [self._message(request) for request in requests]
        loop = asyncio.get_running_loop()
        responses = [_Response(request, loop.create_future(), ended) for request in requests]
        by_name = dict(zip((message.rid for message in messages), responses, strict=True))
        self._responses |= by_name
        try:
            for message, response in zip(messages, responses, strict=True):
                await self._alive().send(message)
                response.is_sent = True
            await asyncio.wait([each.ended for each in responses], return_when=asyncio.FIRST_EXCEPTION)
            failed = [each for each in responses if each.ended.done() and each.ended.exception()]
            return [_sample(each, each.ended.result()) for each in failed or responses]
        except BaseException:
            for response in responses:
                response.tell = do_nothing  # the caller has gone
            await self._abort(by_name)
            raise
        finally:
            for name, response in by_name.items():
                if response.ended.done() or not response.is_sent:
                    self._responses.pop(name, None)

    async def _abort(self, responses: Mapping[str, _Response]) -> None:
        """Orders the end of requests; does not wait for it, because the engine may hang."""
        from sglang.srt.managers.io_struct import AbortReq

        if self._link is None or self._unusable or self._link.ended:
            return
        for name, response in responses.items():
            if response.is_sent and not response.ended.done():
                response.is_aborted = True
                with contextlib.suppress(PeerLostError, DeadlineError):  # `_watch` ends all requests
                    await self._link.send(AbortReq(rid=name))

    async def _settled(self) -> None:
        """Waits until aborted requests have ended and the engine has released the requests of its last step.

        Does not wait if the engine is paused, which ends no request, or while other requests are under way.
        """
        if self._is_paused:
            return
        if ending := [each.ended for each in self._responses.values() if each.is_aborted]:
            await asyncio.wait(ending, timeout=_DRAIN_S)
        deadline = time.monotonic() + _DRAIN_S
        while all(each.ended.done() for each in self._responses.values()) and time.monotonic() < deadline:
            if all(reply["idle"] for reply in await self._ordered("paceline_is_idle")):
                return
            await asyncio.sleep(_IDLE_LOOK_S)

    def _message(self, request: SampleRequest) -> Any:
        """Translates a request.

        Raises:
            InvalidMessageError: SGLang could not run it.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling, token_ids = request.sampling, array("q", [*request.prompt_token_ids, *request.drawn])
        rest = sampling.max_tokens - len(request.drawn)
        if not token_ids or len(token_ids) + rest > self._config.engine_model_len:
            raise refused(request, f"{len(token_ids)} tokens and {rest} to draw do not fit")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise refused(request, f"a token id is outside 0..{self.vocab_size - 1}")
        if request.images:
            raise refused(request, "images are not supported with SGLang")
        params = SamplingParams(
            max_new_tokens=rest,
            stop_token_ids=set(sampling.stop_token_ids),
            temperature=sampling.temperature or 1.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            sampling_seed=request.seed,
        )
        params.normalize(None)
        if not sampling.temperature:
            params.temperature = GREEDY
        return TokenizedGenerateReqInput(
            rid=f"{next(self._names):012x}",
            input_text=None,
            input_ids=token_ids,
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=request.cache_salt or None,
        )

    def _take(self, output: Any) -> None:
        """Handles a message of rank 0: new tokens of requests, or the end of one that had not begun."""
        if type(output).__name__ == "AbortReq":
            self._end(output.rid, output.finished_reason or {"type": "abort"})
            return
        if type(output).__name__ != "BatchTokenIDOutput":
            return
        for number, name in enumerate(output.rids):
            response = self._responses.get(name)
            if response is None:
                continue
            response.token_ids += output.output_ids[number]
            if output.output_token_logprobs_val:
                response.log_probs += output.output_token_logprobs_val[number]
            if reason := output.finished_reasons[number]:
                self._end(name, reason)

    def _end(self, name: str, reason: dict[str, Any]) -> None:
        response = self._responses.get(name)
        if response is None or response.ended.done():
            return
        if response.is_aborted:
            del self._responses[name]
        end = _ENDS.get(reason["type"])
        if end is FinishReason.ABORT and reason.get("message") not in _NO_ERRORS:
            end = None
        # SGLang checks the length first, even if the last token that fits ends the response.
        if end is FinishReason.LENGTH and response.is_stopped:
            end = FinishReason.STOP
        if end is None:
            why = f"the engine has ended request {response.request.request_id} with an error: {reason}"
            response.fail(PacelineError(why))
        else:
            response.ended.set_result(end)
            response.tell()

    async def sleep(self) -> int:
        """Unmaps weights and KV cache on every rank."""
        if self._asleep != set(EnginePart):
            await self.resume()
            await self._abort(dict(self._responses))
            await self._settled()
            replies = await self._ordered("paceline_sleep")
            self._freed_bytes = max(self._freed_bytes, *(int(reply["freed_bytes"]) for reply in replies))
            self._asleep = set(EnginePart)
        return self._freed_bytes

    async def wake(self, part: EnginePart) -> None:
        """Maps the memory of a part again."""
        if part in self._asleep:
            await self._ordered("paceline_wake", _TAGS[part])
            self._asleep.remove(part)

    async def _ordered(self, method: str, *args: Any) -> list[Reply]:
        return await self.call_workers(method, args, _SLEEP_S)

    async def _answers(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
        return await self._alive().call(method, *args, timeout_s=timeout_s)

    def _give_up(self, error: PeerLostError) -> PeerLostError:
        for response in self._responses.values():
            if not response.ended.done():
                response.fail(error)
        return super()._give_up(error)

    def _alive(self) -> Link:
        if self._unusable is not None:
            raise self._unusable
        if self._link is None:
            raise PeerLostError("the inference engine has been shut down", peer=LocalPart.ENGINE)
        return self._link

    async def _watch(self) -> None:
        """Ends all requests with an error when a process of the engine has ended."""
        while (link := self._link) is not None:
            if link.ended:
                self._give_up(self._unusable or engine_died(codes=link.ended))
                return
            await asyncio.sleep(_LOOK_S)

    async def check_health(self) -> None:
        """Raises PeerLostError if the engine has died, hangs, or can never be pushed into again."""
        link = self._alive()
        if link.ended:
            raise self._give_up(engine_died(codes=link.ended))
        self._check_running()

    async def shutdown(self) -> None:
        """Ends every process of the engine."""
        link, self._link = self._link, None
        if self._watching is not None:
            self._watching.cancel()
        if link is not None:
            await asyncio.to_thread(link.kill)


def _sample(response: _Response, end: FinishReason) -> Sample:
    log_probs = np.asarray(response.log_probs, dtype=np.float32)
    return Sample(
        token_ids=np.asarray(response.token_ids, dtype=np.int32), log_probs=log_probs, finish_reason=end
    )
