"""Compares an agent's requests with the recorded conversation, to find the segment that a request continues.

A request that repeats a segment's messages unchanged, and adds some, continues the segment's tokens. Any
other request begins a new segment with a prompt of its own: the agent has rewritten its history, or acts as
another persona.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.core.samples.chat import Message, ToolSpec
from paceline.core.samples.episode import EpisodeOutcome
from paceline.rollout.episodes.joiner import Joiner
from paceline.rollout.episodes.recorder import Draw, Recorder


@dataclass(kw_only=True, slots=True)
class Segment:
    """One sequence of an episode: its tokens, the messages that they stand for, the tools of its prompt."""

    recorder: Recorder
    tools: str
    history: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSlot:
    """The place of a request's answer: in `segment`, after the new tokens `token_ids`."""

    segment: Segment
    token_ids: tuple[int, ...]
    messages: tuple[str, ...]
    is_new: bool


@dataclass(slots=True)
class Conversation:
    """The segments of an episode, in the order in which they began."""

    joiner: Joiner
    segments: list[Segment] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSpec], most: int) -> AnswerSlot:
        """Returns where the answer to a request belongs; records nothing yet.

        Raises:
            TooManyTokensError: the request adds more than `most` tokens.
        """
        said = tuple(_form(message) for message in messages)
        offered = json.dumps([tool.to_template() for tool in tools], sort_keys=True)
        for segment in reversed(self.segments):
            known = len(segment.history)
            added = messages[known:]
            if segment.tools != offered or segment.history != list(said[:known]) or not added:
                continue
            if all(message.role != "assistant" for message in added):
                between = self.joiner.between(added, most=most)
                return AnswerSlot(
                    segment=segment, token_ids=tuple(between), messages=said[known:], is_new=False
                )
        prompt = self.joiner.prompt([self._plain(message) for message in messages], tools, most=most)
        segment = Segment(recorder=Recorder(prompt), tools=offered, history=[])
        return AnswerSlot(segment=segment, token_ids=tuple(prompt), messages=said, is_new=True)

    def context(self, place: AnswerSlot) -> list[int]:
        """Returns all tokens before the answer."""
        before = [] if place.is_new else place.segment.recorder.context
        return [*before, *place.token_ids]

    def take(self, place: AnswerSlot) -> Recorder:
        """Adds the request's messages to the conversation."""
        if place.is_new:
            self.segments.append(place.segment)
        else:
            place.segment.recorder.observed(place.token_ids)
        place.segment.history += place.messages
        return place.segment.recorder

    def answered(self, place: AnswerSlot, answer: Message, text: str) -> None:
        """Adds the policy's answer, as the client got it, and the text that it wrote."""
        form = _form(answer)
        place.segment.history.append(form)
        self._texts[form] = text

    def draw(self, outcome: EpisodeOutcome) -> Draw:
        """Returns the draw of the finished episode."""
        return Draw.joined([segment.recorder.draw(outcome) for segment in self.segments])

    def _plain(self, message: Message) -> dict[str, object]:
        """Returns a message for the chat template; the policy's own answers are rendered as it wrote them."""
        role, joiner = message.role, self.joiner
        if role == "system":
            return {"role": role, "content": joiner.without_control(message.content)}
        if role == "assistant":
            text = self._texts.get(_form(message))
            said = joiner.without_control(message.content if text is None else text)
            plain: dict[str, object] = {"role": role, "content": said}
            if text is None and message.tool_calls:
                calls = [
                    {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                    for c in message.tool_calls
                ]
                plain["tool_calls"] = joiner.without_control(calls)
            return plain
        return joiner.plain(message, is_cut=False)


def _form(message: Message) -> str:
    """Returns a form that is equal for messages that say the same: call ids and outer spaces do not count."""
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    plain = replace(message, tool_calls=())
    return json.dumps([plain.role, plain.content.strip(), calls], sort_keys=True)
