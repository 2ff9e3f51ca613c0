"""Episodes with an engine that says what a test wrote down, and sessions that record what happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.chat import Message
from paceline.core.samples.trajectory import FinishReason, PromptGroup, RewardContext, SamplingSpec
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.episodes.environment import EpisodeTask, Grade, Opening, TurnResult
from paceline.rollout.episodes.environments import remote
from paceline.rollout.episodes.group import Episodes
from paceline.rollout.episodes.joiner import Joiner
from paceline.rollout.episodes.loop import EpisodeRules
from paceline.rollout.episodes.states import EpisodeLimits
from paceline.rollout.trajectories import check_samples
from support.chat_templates import QWEN2_5, tokenizer

TOKENIZER = tokenizer(QWEN2_5)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
POLICY = PolicyTag(version=0, digest="0" * 16)
QUESTION = ({"role": "user", "content": "What is 1 + 2?"},)


def ids(text: str) -> list[int]:
    """Tokens of a text."""
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def text(tokens: Sequence[int]) -> str:
    """Text of tokens, special ones included."""
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=False))


def call(name: str, arguments: str = "{}") -> str:
    """What the policy writes to call a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Script:
    """An engine whose n-th turn of every episode is the n-th line; the last line is said again and again."""

    def __init__(self, *lines: str | Exception) -> None:
        self._lines = lines
        self._turns: dict[str, int] = {}
        self.requests: list[SampleRequest] = []
        self.log_prob = -0.5

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        [request] = requests
        self.requests.append(request)
        episode = request.request_id.rpartition(".")[0]
        turn = self._turns[episode] = self._turns.get(episode, 0) + 1
        line = self._lines[min(turn, len(self._lines)) - 1]
        if isinstance(line, Exception):
            raise line
        tokens = [*ids(line), END]
        cut = tokens[: request.sampling.max_tokens]
        reason = FinishReason.STOP if cut == tokens else FinishReason.LENGTH
        log_probs = np.full(len(cut), self.log_prob, np.float32)
        return [Sample(token_ids=np.array(cut, np.int32), log_probs=log_probs, finish_reason=reason)]

    async def check_health(self) -> None: ...


@dataclass
class Echo:
    """An environment that answers "again" until `num_steps` are over, and records all that happens."""

    num_steps: int = 2
    losses: list[Exception] = field(default_factory=list)
    events: list[tuple[str, Any]] = field(default_factory=list)
    opening: Opening = field(default_factory=Opening)
    call_names: Sequence[str] = ()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def session(self, task: EpisodeTask) -> EchoSession:
        return EchoSession(self, task)


class EchoSession:
    def __init__(self, environment: Echo, task: EpisodeTask) -> None:
        self._environment, self._task = environment, task

    async def open(self) -> Opening:
        self._environment.events.append(("open", self._task))
        return self._environment.opening

    async def step(self, turn: int, action: Message) -> TurnResult:
        self._environment.events.append(("step", action.content))
        if self._environment.losses:
            raise self._environment.losses.pop(0)
        done = "over" if turn >= self._environment.num_steps else ""
        return TurnResult(messages=(Message(role="tool", content="again"),), stop_reason=done)

    async def close(self, stop_reason: str) -> Grade:
        self._environment.events.append(("close", stop_reason))
        return Grade(reward=2.0, components={"turns": 1.0})

    async def abandon(self) -> None:
        self._environment.events.append(("abandon", None))


def limits(**changes: Any) -> EpisodeLimits:
    """Wide limits, but for the changes."""
    wide: dict[str, Any] = {
        "max_turns": 8,
        "max_turn_tokens": 1000,
        "max_sampled_tokens": 1000,
        "max_response_tokens": 1000,
        "max_tool_calls": 16,
        "tool_s": 60.0,
    }
    return EpisodeLimits(**{**wide, **changes})


def group(*, samples: int = 1, messages: Any = QUESTION) -> PromptGroup:
    """A prompt group whose samples are episodes."""
    joiner = Joiner(TOKENIZER, [END])
    return PromptGroup(
        run_id="r",
        step=1,
        purpose=Purpose.TRAIN,
        prompt_id=7,
        prompt_token_ids=np.array(joiner.prompt(QUESTION, ()), np.int32),
        sampling=SamplingSpec(temperature=1.0, max_tokens=1000, stop_token_ids=(END,)),
        seeds=tuple(range(100, 100 + samples)),
        policy=POLICY,
        context=RewardContext(ground_truth="3", extra={"level": 2}),
        messages=messages,
    )


def episodes(
    engine: Any,
    environment: Any,
    *,
    retries: int = 2,
    endpoint: Any = None,
    max_prompt_tokens: int = 200,
    max_context_tokens: int = 0,
    show_tools: bool = False,
    call_format: str = "tagged",
    **changes: Any,
) -> Episodes:
    """Episodes with the test's tokenizer."""
    rules = EpisodeRules(
        limits=limits(**changes),
        joiner=Joiner(TOKENIZER, [END], show_tools=show_tools, observation_tokens=50),
        tokenizer=TOKENIZER,
        call_format=call_format,
        max_prompt_tokens=max_prompt_tokens,
    )
    return Episodes(
        engine=engine,
        environment=environment,
        rules=rules,
        retries=retries,
        check=check_samples,
        endpoint=endpoint,
        max_context_tokens=max_context_tokens,
    )


@asynccontextmanager
async def patient_abandonment() -> AsyncIterator[None]:
    """Lets a rollout server wait until an environment has freed an episode, however busy the machine is."""
    with mock.patch.object(remote, "_ABANDON_S", 60.0):
        yield
