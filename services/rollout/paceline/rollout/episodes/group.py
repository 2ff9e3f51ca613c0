"""Draws the episodes of a prompt group, all at once; repeats an episode whose environment was lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.core.errors import ModelError
from paceline.core.samples.trajectory import PromptGroup
from paceline.data.prompts import Tokenizer, load_tokenizer, stop_token_ids
from paceline.rollout.engines.base import Engine, Sample, SampleRequest
from paceline.rollout.episodes.admission import AdmissionControl, Grow
from paceline.rollout.episodes.agents.drive import drive_episode
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environment import (
    EnvironmentLostError,
    EpisodeEnvironment,
    EpisodeTask,
)
from paceline.rollout.episodes.environments.attached import AttachedEnvironment
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.joiner import TOOLS_NOT_SHOWN, Joiner
from paceline.rollout.episodes.loop import AttemptParts, EpisodeRules, Slot, run_episode
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.episodes.states import EpisodeLimits
from paceline.rollout.episodes.tools import calls
from paceline.rollout.episodes.tools.tool_pool import ToolPool
from paceline.service.identity.credentials import Credentials

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Pause in seconds before the second attempt at an episode; doubles for each further attempt."""

_UNBOUNDED = 2**62

CheckSamples = Callable[[PromptGroup, list[Sample]], None]


class Episodes:
    """Draws prompt groups as episodes.

    Args:
        environment: answers the turns; whoever started it closes it.
        retries: further attempts at an episode whose environment was lost.
        check: raises for samples that must not leave the server.
        endpoint: endpoint for agents that lead their episodes; None: episodes are led here.
        max_context_tokens: most tokens of all open episodes together; further episodes wait. 0: any number.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        environment: EpisodeEnvironment,
        rules: EpisodeRules,
        retries: int,
        check: CheckSamples,
        endpoint: AgentEndpoint | None = None,
        max_context_tokens: int = 0,
    ) -> None:
        self._engine, self._environment, self._rules = engine, environment, rules
        self._retries, self._check, self._endpoint = retries, check, endpoint
        self._admission = AdmissionControl(max_context_tokens or _UNBOUNDED)
        self._last_attempt = 0

    @property
    def is_full(self) -> bool:
        """Whether episodes wait for others to end: the KV cache has no room for them."""
        return self._admission.is_full

    async def draw(self, group: PromptGroup, serial: str, slots: Callable[[], Slot]) -> list[Draw]:
        """Draws all episodes of a group, in the order of its seeds; a cancellation abandons them.

        Args:
            serial: differs between deliveries of a group.
            slots: makes the slot of one sample.

        Raises:
            EnvironmentLostError: an episode's environment was lost in every attempt.
            Exception: the first error of an episode; the others are abandoned.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._episode(group, index, serial, slots()), name=f"episode {index}")
                    for index in range(group.num_samples)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    async def _episode(self, group: PromptGroup, index: int, serial: str, slot: Slot) -> Draw:
        # The samples of a group share their prompt's keys and values, so the prompt counts only for the
        # first.
        own = len(group.prompt_token_ids) if index == 0 else 0
        async with self._admission.entered(own + self._rules.limits.max_turn_tokens) as grow:
            return await self._attempts(group, index, serial, slot, grow)

    async def _attempts(self, group: PromptGroup, index: int, serial: str, slot: Slot, grow: Grow) -> Draw:
        async def generate(request: SampleRequest) -> Sample:
            samples = await self._engine.generate([request])
            self._check(group, samples)
            shared = len(group.prompt_token_ids) if index else 0
            grow(max(len(request.prompt_token_ids) + len(samples[0].token_ids) - shared, 0))
            return samples[0]

        for retry in itertools.count():
            attempt = AttemptParts(
                group=group,
                index=index,
                session=self._environment.session(EpisodeTask.of(group, index, self._next_attempt())),
                generate=generate,
                rules=self._rules,
                slot=slot,
                serial=f"{serial}.{retry}",
            )
            try:
                drawn = await self._run(attempt)
                slot.end()
                return drawn
            except EnvironmentLostError as error:
                if retry >= self._retries:
                    raise
                log.warning("%s begins again: %s", group.trajectory_id(index), error)
            with slot.paused():
                await asyncio.sleep(_PAUSE_S * 2**retry)
        raise AssertionError("the last attempt returns or raises")

    async def _run(self, attempt: AttemptParts) -> Draw:
        if self._endpoint is None:
            return await run_episode(attempt)
        return await drive_episode(attempt, self._endpoint)

    def _next_attempt(self) -> int:
        """Returns the time in microseconds, which rises across servers, restarts and a lost broker."""
        self._last_attempt = max(self._last_attempt + 1, time.time_ns() // 1000)
        return self._last_attempt


def environment_of(
    config: RunConfig, credentials: Credentials, *, run_id: str = "", is_over: Callable[[], bool] = bool
) -> EpisodeEnvironment:
    """Returns the environment that the configuration names: a service, an attached client, or tools.

    Args:
        run_id, is_over: as for `AttachedEnvironment`.

    Raises:
        ConfigError: the file with the service's token cannot be read.
    """
    episode, service = config.rollout.episode, config.rollout.environment
    if service is not None and service.attached is not None:
        return AttachedEnvironment(
            service.attached,
            run_id=run_id,
            play_s=config.request_timeout_s,
            wait_s=service.call_s,
            is_over=is_over,
        )
    if service is not None:
        options = RemoteEnvironmentOptions.of(
            service, turn_s=config.request_timeout_s, credentials=credentials
        )
        return RemoteEnvironment(options)
    return ToolPool(
        config.rollout.tools,
        call_s=episode.step_s,
        memory_bytes=episode.tool_memory_mib * 2**20,
        num_processes=episode.tool_processes,
    )


def load_rules(config: RunConfig, model: ModelConfig) -> EpisodeRules:
    """Applies `rules_of` to the tokenizer of a model's folder; raises ModelError if that does not load."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, config.data.chat_template_kwargs)
    return rules_of(config, tokenizer, stop_token_ids(model.path, tokenizer))


def rules_of(config: RunConfig, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...]) -> EpisodeRules:
    """Returns the configuration's rules for episodes.

    Raises:
        ModelError: the chat template does not pass the self-test, or does not show `rollout.tools`.
        ConfigError: there is no such format of calls.
    """
    episode = config.rollout.episode
    template = tokenizer.chat_template or ""
    call_format = calls.format_of(template) if episode.call_format == "auto" else episode.call_format
    calls.check_format(call_format)
    joiner = Joiner(
        tokenizer,
        stop_token_ids,
        observation_tokens=episode.observation_tokens,
        show_tools=episode.show_tools,
    )
    if config.rollout.tools and episode.show_tools and not joiner.shows_tools():
        raise ModelError(TOOLS_NOT_SHOWN)
    return EpisodeRules(
        limits=EpisodeLimits.of(config.rollout, config.data.max_response_length),
        joiner=joiner,
        tokenizer=tokenizer,
        call_format=call_format,
        max_prompt_tokens=config.data.max_prompt_length,
    )
