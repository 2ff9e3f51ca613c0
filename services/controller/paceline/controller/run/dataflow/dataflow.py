"""The dataflow of a training step, as a program over the verbs: the built-in one, or a user's."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable

from paceline.config.run import RunConfig
from paceline.controller.run.dataflow.verbs import Verbs
from paceline.core.errors import ConfigError, DeadlineError, PacelineError
from paceline.core.text import one_line
from paceline.core.user_functions.user_function import find_function

Dataflow = Callable[[Verbs], Awaitable[None]]
"""Called once per step, and again from the beginning if the step was interrupted."""


async def policy_gradient(step: Verbs) -> None:
    """Samples the step's prompts, trains on all samples, publishes: PPO, GRPO, ReMax and similar."""
    samples = await step.sample(step.draw(), texts=False)
    await step.train(samples.against("greedy"))
    await step.publish()


def load_dataflow(config: RunConfig) -> Dataflow:
    """Returns the dataflow that the configuration names.

    Raises:
        ConfigError: trainer.dataflow names no coroutine function of one argument.
    """
    reference = config.trainer.dataflow
    if reference is None:
        return policy_gradient
    function = find_function(reference, "dataflow")
    if not inspect.iscoroutinefunction(function) or not _takes_one(function):
        raise ConfigError(
            f"trainer.dataflow={reference} is no dataflow; write `async def flow(step)`, which awaits verbs "
            "of its argument (docs/python.md)"
        )
    return function


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True


async def carry_out(flow: Dataflow, verbs: Verbs) -> dict[str, float]:
    """Carries a step out; returns its metrics.

    Raises:
        ConfigError: the dataflow raised an error of its own, or left out a verb.
        DeadlineError: the dataflow took too long between two verbs.
        PacelineError: the error of a verb, even if the dataflow caught it.
    """
    try:
        async with asyncio.timeout(verbs.patience) as verbs.timeout:
            await flow(verbs)
    except PacelineError as error:
        if verbs.failure in (None, error):
            raise
        raise verbs.failure from error
    except Exception as error:
        if verbs.failure is not None:
            raise verbs.failure from error
        if isinstance(error, TimeoutError) and verbs.timeout is not None and verbs.timeout.expired():
            raise DeadlineError(
                phase=f"step {verbs.number}",
                peer="the dataflow",
                seconds=verbs.patience,
                hint="the dataflow calls no verb; see what it waits for, or raise barrier.collect_timeout_s",
            ) from error
        raise _own(error, verbs) from error
    return verbs.metrics()


def _own(error: Exception, verbs: Verbs) -> ConfigError:
    """Returns the error that reports an exception of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return ConfigError(
        one_line(
            f"trainer.dataflow raised {type(error).__name__} in step {verbs.number}: {error}{place}; correct "
            "it, and start the run again: it goes on with this step"
        )
    )
