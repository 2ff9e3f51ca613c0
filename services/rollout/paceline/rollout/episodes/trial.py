"""Plays one episode before a run, with the configured environment and a scripted policy.

The script calls each tool of the episode once, with arguments made from its schema, then answers with the
ground truth. No model is loaded: this shows whether the environment can be played, not how well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.chat import Message, ToolSpec
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.trajectory import FinishReason, PromptGroup, SamplingSpec
from paceline.data.prompts import Prompt
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.episodes.agents.drive import drive_episode
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environment import DrivenSession, EpisodeTask, Grade, Opening, TurnResult
from paceline.rollout.episodes.environments.remote import RemoteEnvironment
from paceline.rollout.episodes.loop import AttemptParts, EpisodeRules, Slot, run_episode
from paceline.rollout.episodes.tools.calls import write_call

_MAX_TURNS = 8
_MADE_UP: Mapping[str, object] = {
    "string": "1",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "object": {},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedEpisode:
    """The played episode; `first_answer` is the environment's answer to the first turn, "" for none."""

    outcome: EpisodeOutcome
    first_answer: str


async def play_episode(
    prompt: Prompt,
    environment: RemoteEnvironment,
    *,
    rules: EpisodeRules,
    stop_token_ids: tuple[int, ...],
    drives: bool,
) -> PlayedEpisode:
    """Plays an episode of at most 8 turns.

    Args:
        stop_token_ids: tokens that end a turn.

    Raises:
        EnvironmentLostError: the environment failed.
        InvalidMessageError: the prompt and the environment's messages are too long, or the chat template does
            not show its tools.
    """
    max_turns = min(rules.limits.max_turns, _MAX_TURNS)
    rules = replace(rules, limits=replace(rules.limits, max_turns=max_turns))
    group = _group(prompt, rules, stop_token_ids)
    session = _Watched(environment.session(EpisodeTask.of(group, 0, attempt=1)))
    script = _Script(session, rules, prompt.context.ground_truth or "1", stop_token_ids[0])
    attempt = AttemptParts(
        group=group,
        index=0,
        session=session,
        generate=script.generate,
        rules=rules,
        slot=Slot(),
        serial="0",
    )
    if drives:
        endpoint = AgentEndpoint(host="127.0.0.1", tls=None)
        await endpoint.start()
        try:
            drawn = await drive_episode(attempt, endpoint)
        finally:
            await endpoint.close()
    else:
        drawn = await run_episode(attempt)
    assert drawn.episode is not None, "it was an episode"
    return PlayedEpisode(outcome=drawn.episode, first_answer=session.first_answer)


def _group(prompt: Prompt, rules: EpisodeRules, stop_token_ids: tuple[int, ...]) -> PromptGroup:
    """Returns a group with one sample of a prompt, outside of any run."""
    return PromptGroup(
        run_id=f"check-{time.time_ns()}",
        step=1,
        purpose=Purpose.TRAIN,
        prompt_id=prompt.prompt_id,
        prompt_token_ids=prompt.token_ids,
        sampling=SamplingSpec(
            temperature=1.0, max_tokens=rules.limits.max_response_tokens, stop_token_ids=stop_token_ids
        ),
        seeds=(1,),
        policy=PolicyTag(version=0, digest="0" * 16),
        context=prompt.context,
        messages=prompt.messages,
    )


class _Watched:
    """A session that notes the episode's tools, and the environment's answer to the first turn."""

    def __init__(self, session: DrivenSession) -> None:
        self._session = session
        self.tools: tuple[ToolSpec, ...] = ()
        self.first_answer = ""

    async def open(self) -> Opening:
        opening = await self._session.open()
        self.tools = opening.tools
        return opening

    async def step(self, turn: int, action: Message) -> TurnResult:
        result = await self._session.step(turn, action)
        if turn == 1:
            self.first_answer = "\n".join(message.content for message in result.messages)
        return result

    async def run(self, base_url: str, token: str, model: str) -> str:
        return await self._session.run(base_url, token, model)

    async def close(self, stop_reason: str) -> Grade:
        return await self._session.close(stop_reason)

    async def abandon(self) -> None:
        await self._session.abandon()


class _Script:
    """Replaces the policy: calls each tool of the episode, then gives the same answer in each turn."""

    def __init__(self, session: _Watched, rules: EpisodeRules, answer: str, end: int) -> None:
        self._session, self._rules, self._answer, self._end = session, rules, answer, end
        self._num_turns = 0

    async def generate(self, request: SampleRequest) -> Sample:
        """Returns the next turn, cut to the tokens that it may have."""
        tools, text = self._session.tools, self._answer
        if self._num_turns < len(tools):
            tool = tools[self._num_turns]
            text = write_call(tool.name, made_up_arguments(tool), self._rules.call_format)
        self._num_turns += 1
        ids = [*self._rules.tokenizer(text, add_special_tokens=False)["input_ids"], self._end]
        taken = ids[: request.sampling.max_tokens]
        return Sample(
            token_ids=np.array(taken, dtype=np.int32),
            log_probs=np.zeros(len(taken), dtype=np.float32),
            finish_reason=FinishReason.STOP if taken == ids else FinishReason.LENGTH,
        )


def made_up_arguments(tool: ToolSpec) -> dict[str, object]:
    """Returns values for the arguments that a tool requires, of the types in its schema."""
    properties: Any = tool.parameters.get("properties", {})
    needed: Any = tool.parameters.get("required", [])
    return {name: _made_up(properties.get(name, {})) for name in needed}


def _made_up(schema: Mapping[str, Any]) -> object:
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if "default" in schema:
        return schema["default"]
    return _MADE_UP.get(str(schema.get("type", "string")), "1")
