"""One episode that an agent leads: the agent asks for answers at the episode's address, in any order.

    open -> run: (request -> tokens -> engine -> calls -> answer) ... -> close -> Draw

Consumes: requests from the endpoint, the engine. Unblocked by: the session's `run`, which has a deadline; the
sampler's deadline bounds the whole episode. Produces: one `Draw`, of one segment or several. Requests are
answered one after the other; the agent's time between them counts as the time of its tools.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace

from paceline.core.samples.chat import Message
from paceline.core.samples.episode import OVER_CODE, OVER_MESSAGE
from paceline.core.samples.trajectory import FinishReason
from paceline.core.text import one_line
from paceline.rollout.engines.base import Sample
from paceline.rollout.episodes import states
from paceline.rollout.episodes.agents.completions import ChatAnswer, ChatRequest, RefusedRequestError
from paceline.rollout.episodes.agents.conversation import AnswerSlot, Conversation
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint, PendingRequest
from paceline.rollout.episodes.environment import DrivenSession, EnvironmentLostError
from paceline.rollout.episodes.joiner import TooManyTokensError
from paceline.rollout.episodes.loop import AttemptParts, EpisodeRunner, turn_seed
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.episodes.states import EpisodePhase
from paceline.rollout.episodes.tools.calls import without_calls
from paceline.service.threads import in_thread

IGNORED = "ignored_settings"
"""Name of the reward component that counts the settings which clients asked for and did not get."""
FINISHED = "finished"
"""The stop reason of an agent that returns."""


async def drive_episode(attempt: AttemptParts, endpoint: AgentEndpoint) -> Draw:
    """Lets an agent lead an episode to its end; the attempt's session is a `DrivenSession`.

    Raises:
        EnvironmentLostError: the episode must begin again, in another session.
        Exception: whatever `generate` raises.
    """
    return await _Episode(attempt, endpoint).run()


class _Episode(EpisodeRunner):
    def __init__(self, attempt: AttemptParts, endpoint: AgentEndpoint) -> None:
        super().__init__(attempt)
        assert isinstance(attempt.session, DrivenSession), "rollout.environment.drives names a service"
        self._session, self._endpoint = attempt.session, endpoint
        self._conversation = Conversation(attempt.rules.joiner)
        self._answers: dict[bytes, ChatAnswer] = {}
        self._counts: dict[str, int] = {}
        self._ignored: set[str] = set()
        self._idle_since = time.monotonic()

    async def _play(self) -> Draw:
        with self._slot.paused():
            await self._session.open()
            self._move(states.Opened())
            with self._endpoint.open(self._group.sampling.temperature) as inbox:
                running = asyncio.create_task(
                    self._session.run(inbox.base_url, inbox.token, inbox.model), name="agent"
                )
                running.add_done_callback(lambda _: inbox.close())
                try:
                    while (pending := await inbox.next()) is not None:
                        await self._answer(pending)
                finally:
                    running.cancel()
                    await asyncio.wait([running])
            return await self._close(running)

    async def _close(self, running: asyncio.Task[str]) -> Draw:
        if not self._conversation.segments:
            running.result()
            raise EnvironmentLostError("the agent ended without a request", peer="agent")
        if self._standing.phase is not EpisodePhase.CLOSING:
            reason = running.result() or FINISHED
            self._move(states.Observed(seconds=self._idle_s(), stop_reason=reason))
        grade = await self._session.close(self._standing.stop_reason)
        self._move(states.Closed())
        ignored = {IGNORED: float(len(self._ignored))} if self._ignored else {}
        outcome = self._standing.outcome(grade.reward, {**grade.components, **ignored})
        return self._conversation.draw(outcome)

    async def _answer(self, pending: PendingRequest) -> None:
        """Answers a request, or refuses it; a repeated request gets the first answer."""
        known = self._answers.get(pending.digest) if pending.is_repeated else None
        if known is not None:
            pending.answer(known)
            return
        self._ignored.update(pending.request.ignored)
        try:
            answer = await self._turn(pending.request)
        except RefusedRequestError as refusal:
            pending.refuse(refusal)
            return
        self._answers[pending.digest] = answer
        pending.answer(answer)

    async def _turn(self, request: ChatRequest) -> ChatAnswer:
        self._check_open()
        place = await self._place(request)
        context = self._conversation.context(place)
        self._slot.resume()
        try:
            asked = self._request(context, self._seed(context), request.max_tokens)
            sample = await self._attempt.generate(asked)
        finally:
            self._slot.pause()
        self._conversation.take(place).sampled(sample)
        action = self._sampled(sample, request.tools)
        self._idle_since = time.monotonic()
        if self._standing.stop_reason == "max_tool_calls":
            self._check_open()
        message = self._message(action)
        self._conversation.answered(place, message, action.content)
        answer = self._chat_answer(request, message, len(context), sample)
        return replace(answer, problems=tuple(call for call in action.tool_calls if call.problem))

    async def _place(self, request: ChatRequest) -> AnswerSlot:
        """Returns where the answer belongs; a request that adds too much ends the episode."""
        rules, standing, idle_s = self._rules, self._standing, self._idle_s()
        is_first = not self._conversation.segments
        room = rules.limits.max_response_tokens - standing.num_response
        most = rules.max_prompt_tokens if is_first else max(room, 0)
        place, num_tokens = None, 0
        try:
            # In a thread: a long text takes seconds.
            place = await in_thread(self._conversation.place, request.messages, request.tools, most)
            num_tokens = len(place.token_ids)
        except TooManyTokensError as error:
            if is_first:
                raise RefusedRequestError(
                    400,
                    "context_length_exceeded",
                    f"the first request has {error}, data.max_prompt_length is {most}",
                ) from error
            num_tokens = error.num_tokens
        except Exception as error:
            raise RefusedRequestError(
                400,
                "unsupported_messages",
                f"the chat template does not take these messages: {one_line(str(error))}",
            ) from error
        if not is_first:
            self._move(states.Observed(seconds=idle_s, num_tokens=num_tokens))
            self._check_open()
        assert place is not None, "an episode ends if its tokens find no room"
        return place

    def _message(self, action: Message) -> Message:
        """Returns the message for the client: calls if all of them can be read, else the text."""
        calls = action.tool_calls
        if not calls or any(call.problem for call in calls):
            return replace(action, tool_calls=())
        return replace(action, content=without_calls(action.content, self._rules.call_format))

    def _chat_answer(
        self, request: ChatRequest, message: Message, num_prompt_tokens: int, sample: Sample
    ) -> ChatAnswer:
        is_cut = sample.finish_reason is FinishReason.LENGTH
        return ChatAnswer(
            answer_id=f"chatcmpl-{self._group.trajectory_id(self._attempt.index)}-{self._standing.num_turns}",
            model=self._endpoint.model,
            created=int(time.time()),
            content=message.content,
            tool_calls=message.tool_calls,
            finish_reason="length" if is_cut else "tool_calls" if message.tool_calls else "stop",
            num_prompt_tokens=num_prompt_tokens,
            num_answer_tokens=len(sample.token_ids),
            ignored=request.ignored,
        )

    def _seed(self, context: list[int]) -> int:
        """Derives a seed from the context and its count, whatever the order of an agent's requests."""
        digest = hashlib.blake2b(repr(context).encode(), digest_size=8).hexdigest()
        count = self._counts[digest] = self._counts.get(digest, 0) + 1
        return turn_seed(self._group.seeds[self._attempt.index], f"{digest}/{count}")

    def _check_open(self) -> None:
        if self._standing.phase is EpisodePhase.CLOSING:
            raise RefusedRequestError(400, OVER_CODE, f"{OVER_MESSAGE}: {self._standing.stop_reason}")

    def _idle_s(self) -> float:
        return time.monotonic() - self._idle_since
