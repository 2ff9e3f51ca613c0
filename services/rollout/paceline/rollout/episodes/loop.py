"""One episode: turns of the policy and answers of the environment, until a limit or the environment ends it.

    open -> prompt -> (engine -> calls -> step -> tokens between) ... -> close -> Draw

Consumes: a session, the engine. Unblocked by: the engine's samples and the session's answers, each of which
has a deadline; the sampler's deadline bounds the whole episode. Produces: one `Draw`.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import InvalidMessageError
from paceline.core.samples.chat import Message, ToolSpec
from paceline.core.samples.trajectory import FinishReason, PromptGroup
from paceline.data.prompts import Tokenizer
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.episodes import states
from paceline.rollout.episodes.environment import Opening, Session
from paceline.rollout.episodes.joiner import Joiner
from paceline.rollout.episodes.recorder import Draw, Recorder
from paceline.rollout.episodes.states import EpisodeLimits, EpisodePhase, EpisodeProgress, advance
from paceline.rollout.episodes.tools.calls import read_action

Generate = Callable[[SampleRequest], Awaitable[Sample]]
"""Draws one turn, and raises the errors of `Engine.generate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """Rules that all episodes of a run share.

    Attributes:
        max_prompt_tokens: largest number of tokens of a prompt, including the environment's messages.
        call_format: see `calls.FORMATS`.
    """

    limits: EpisodeLimits
    joiner: Joiner
    tokenizer: Tokenizer
    call_format: str
    max_prompt_tokens: int


class Slot:
    """Tells the server's capacity whether an episode needs the engine: not while it waits for a tool."""

    def pause(self) -> None:
        """Notes that the engine is not needed for now."""

    def resume(self) -> None:
        """Notes that the engine is needed again."""

    def end(self) -> None:
        """Notes that the episode is over."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the slot for the duration of the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptParts:
    """The parts that one attempt at an episode works with.

    Attributes:
        session: opened and closed by the attempt, or abandoned if anything fails.
        serial: differs between attempts.
    """

    group: PromptGroup
    index: int
    session: Session
    generate: Generate
    rules: EpisodeRules
    slot: Slot
    serial: str


class EpisodeRunner(abc.ABC):
    """Runs one attempt at an episode, whoever leads it: counts its progress, and makes the policy's turns."""

    def __init__(self, attempt: AttemptParts) -> None:
        self._attempt, self._group, self._rules = attempt, attempt.group, attempt.rules
        self._slot, self._standing = attempt.slot, EpisodeProgress()

    async def run(self) -> Draw:
        """Plays the episode; abandons the session if that fails."""
        try:
            return await self._play()
        except BaseException:
            await self._attempt.session.abandon()
            raise

    @abc.abstractmethod
    async def _play(self) -> Draw:
        """Plays the episode from the session's opening to its grade."""

    def _request(self, context: list[int], seed: int, max_tokens: int | None = None) -> SampleRequest:
        """Returns the request for the next turn, which has at most `max_tokens` if that is not None."""
        group, turn = self._group, self._standing.num_turns + 1
        room = min(group.sampling.max_tokens, self._standing.turn_tokens(self._rules.limits))
        return SampleRequest(
            request_id=f"{group.trajectory_id(self._attempt.index)}#{self._attempt.serial}.{turn}",
            prompt_token_ids=context,
            sampling=replace(group.sampling, max_tokens=min(room, max_tokens or room)),
            seed=seed,
            cache_salt=str(group.policy),
        )

    def _sampled(self, sample: Sample, tools: Sequence[ToolSpec]) -> Message:
        """Counts a turn of the policy; returns its text, with the calls of these tools in it."""
        text = self._rules.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        action = read_action(text, self._rules.call_format, self._standing.num_turns + 1, tools)
        self._move(
            states.TurnSampled(
                num_tokens=len(sample.token_ids),
                num_tool_calls=len(action.tool_calls),
                is_cut=sample.finish_reason is FinishReason.LENGTH,
            )
        )
        return action

    def _move(self, event: states.Event) -> None:
        self._standing = advance(self._standing, event, self._rules.limits)


async def run_episode(attempt: AttemptParts) -> Draw:
    """Runs one attempt at an episode that is led here.

    Raises:
        EnvironmentLostError: the episode must begin again, in another session.
        InvalidMessageError: the prompt and the environment's messages are too long.
        Exception: whatever `generate` raises.
    """
    return await _Episode(attempt).run()


class _Episode(EpisodeRunner):
    def __init__(self, attempt: AttemptParts) -> None:
        super().__init__(attempt)
        self._session = attempt.session
        self._tools: Sequence[ToolSpec] = ()

    async def _play(self) -> Draw:
        recorder = await self._open()
        for turn in itertools.count(1):
            seed = turn_seed(self._group.seeds[self._attempt.index], turn)
            sample = await self._attempt.generate(self._request(recorder.context, seed))
            recorder.sampled(sample)
            action = self._sampled(sample, self._tools)
            if self._standing.phase is EpisodePhase.ACTING:
                between = await self._act(turn, action)
            if self._standing.phase is EpisodePhase.CLOSING:
                return await self._close(recorder)
            recorder.observed(between)
        raise AssertionError("an episode has a limit of turns")

    async def _open(self) -> Recorder:
        with self._slot.paused():
            opening = await self._session.open()
        self._tools = opening.tools
        prompt = self._prompt(opening)
        if len(prompt) > self._rules.max_prompt_tokens:
            raise InvalidMessageError(
                f"prompt {self._group.prompt_id} has {len(prompt)} tokens with its tools and what the "
                f"environment adds, data.max_prompt_length={self._rules.max_prompt_tokens}",
                reason="prompt_too_long",
            )
        self._move(states.Opened())
        return Recorder(prompt)

    def _prompt(self, opening: Opening) -> list[int]:
        joiner = self._rules.joiner
        if not opening.messages and not (opening.tools and joiner.show_tools):
            prompt: list[int] = self._group.prompt_token_ids.tolist()
            return prompt
        said = [{"role": m.role, "content": joiner.safe(m.content)} for m in opening.messages]
        return joiner.prompt([*self._group.messages, *said], opening.tools)

    async def _act(self, turn: int, action: Message) -> list[int]:
        with self._slot.paused():
            observation = await self._session.step(turn, action)
        between = [] if observation.stop_reason else self._rules.joiner.between(observation.messages)
        self._move(
            states.Observed(
                seconds=observation.seconds,
                num_tokens=len(between),
                stop_reason=observation.stop_reason,
            )
        )
        return between

    async def _close(self, recorder: Recorder) -> Draw:
        with self._slot.paused():
            grade = await self._session.close(self._standing.stop_reason)
        self._move(states.Closed())
        return recorder.draw(self._standing.outcome(grade.reward, grade.components))


def turn_seed(episode_seed: int, turn: int | str) -> int:
    """Returns the sampling seed of a turn, in [0, 2**31), by its number from 1 on, or by another name.

    The first turn has the episode's own seed.
    """
    if turn == 1:
        return episode_seed
    return (
        int.from_bytes(hashlib.blake2b(f"{episode_seed}/{turn}".encode(), digest_size=8).digest(), "big")
        >> 33
    )
