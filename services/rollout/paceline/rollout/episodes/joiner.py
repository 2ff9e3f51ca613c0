"""Turns the environment's messages into tokens, which follow those that the policy sampled.

The tokens of a tool's answer are those that the chat template writes between the end of one assistant turn
and the beginning of the next one. They are cut out of a short made-up conversation with that answer in it,
so the history is neither rendered nor tokenized a second time. The self-test shows whether a template allows
this.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import InvalidMessageError, ModelError
from paceline.core.samples.chat import Message, ToolSpec
from paceline.core.text import encodable
from paceline.data.prompts import Tokenizer

TOOLS_NOT_SHOWN = (
    "the chat template does not tell the model of its tools: describe them in the prompts, and set "
    "rollout.episode.show_tools: false to say that this is meant"
)

_MARK = "MARK7Q"
_QUESTION = "QUESTION7Q"
_CHARS_PER_TOKEN = 16
"""A text of more characters per token than this is cut before it is tokenized."""
_BYTE_LETTERS = frozenset(map(chr, (*range(33, 127), *range(161, 173), *range(174, 324))))
"""How byte-level vocabularies write the 256 bytes."""


class TooManyTokensError(Exception):
    """A text has more tokens than it may have; `num_tokens` is how many it has at least."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class Joiner:
    """Renders prompts, and the environment's messages between two turns.

    Args:
        stop_token_ids: token ids that end a turn.
        observation_tokens: most tokens of one message's content; longer content is cut.
        show_tools: whether the template tells the model of its tools.

    Raises:
        ModelError: the template does not pass the self-test.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        *,
        observation_tokens: int = 1024,
        show_tools: bool = True,
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, and episodes are made of chat messages: add one to the "
                "model folder, or take an instruct model"
            )
        self._tokenizer, self._limit, self.show_tools = tokenizer, observation_tokens, show_tools
        self._ends = [tokenizer.decode([end], skip_special_tokens=False) for end in stop_token_ids]
        self._special = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len)[::-1]
        named = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        self._control = [token for token in self._special if named.get(token, True)]
        self._token_chars = _longest_token(tokenizer.get_vocab())
        self.tool_role = "tool"
        self.tool_role = self._self_test()
        self._can_show_tools = self.shows_tools()

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[ToolSpec],
        *,
        most: int | None = None,
    ) -> list[int]:
        """Returns the tokens of a conversation before its first answer, with the assistant's turn opened.

        Raises:
            TooManyTokensError: there are more than `most`; a text that is much too long is not tokenized.
            InvalidMessageError: the template shows no tools, and there are some.
        """
        if tools and self.show_tools and not self._can_show_tools:
            raise InvalidMessageError(TOOLS_NOT_SHOWN, reason="tools_not_shown")
        shown = [self.without_control(tool.to_template()) for tool in tools] if self.show_tools else []
        return self._encode_most(self._render(list(messages), tools=shown), most)

    def between(self, messages: Sequence[Message], *, most: int | None = None) -> list[int]:
        """Returns the tokens after a sampled turn, whose last token ends it, up to the next turn's opening.

        Raises:
            TooManyTokensError: as in `prompt`.
        """
        return self._encode_most(
            self._between([self.plain(message) for message in messages], _QUESTION), most
        )

    def safe(self, text: str) -> str:
        """Returns content from outside, cut to the limit; special tokens are broken, so none is forged."""
        text = encodable(text)
        num_chars = len(text)
        text = self.unforged(text[: self._limit * _CHARS_PER_TOKEN])
        ids = self._encode(text)
        if len(ids) > self._limit:
            text = self._tokenizer.decode(ids[: self._limit], skip_special_tokens=False)
        return text if len(text) >= num_chars else f"{text} [cut: {num_chars} characters]"

    def unforged(self, text: str) -> str:
        """Returns a text from outside with its special tokens broken."""
        return _broken(text, self._special)

    def without_control(self, value: Any) -> Any:
        """Breaks the tokens of turns in a text, or in the texts of JSON; those of tool calls stay."""
        if isinstance(value, str):
            return _broken(encodable(value), self._control)
        if isinstance(value, Mapping):
            return {self.without_control(key): self.without_control(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.without_control(item) for item in value]
        return value

    def shows_tools(self) -> bool:
        """Returns whether the template writes the tools that it is given into the prompt."""
        tool = ToolSpec(name="tool7q", description="", parameters={"type": "object", "properties": {}})
        try:
            text = self._render([{"role": "user", "content": _QUESTION}], tools=[tool.to_template()])
        except Exception:  # noqa: BLE001  a template may raise anything
            return False
        return "tool7q" in text

    def plain(self, message: Message, *, is_cut: bool = True) -> dict[str, object]:
        """Returns a message as templates take it, its content safe, and cut unless `is_cut` is False."""
        role = self.tool_role if message.role == "tool" else message.role
        content = self.safe(message.content) if is_cut else self.unforged(message.content)
        plain: dict[str, object] = {"role": role, "content": content}
        if role == "tool":
            plain |= {"name": message.name or "tool", "tool_call_id": message.call_id}
        return plain

    def _between(self, messages: Sequence[dict[str, object]], question: str) -> str:
        if self.tool_role == "user":  # such templates require users and assistants to alternate
            messages = [{"role": "user", "content": "\n".join(str(m["content"]) for m in messages)}]
        before = [{"role": "user", "content": question}, {"role": "assistant", "content": _MARK}]
        text = self._render([*before, *messages])
        _, mark, tail = text.rpartition(_MARK)
        end = next((end for end in self._ends if tail.startswith(end)), None)
        if not mark or end is None:
            raise ModelError(
                f"after an assistant's message the chat template writes {tail[:40]!r}, which begins with "
                f"none of the tokens that end a turn ({', '.join(map(repr, self._ends))})"
            )
        return tail[len(end) :]

    def _render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> str:
        options = {"tools": list(tools)} if tools else {}
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **options
            )
        )

    def _encode_most(self, text: str, most: int | None) -> list[int]:
        if most is not None and self._token_chars:
            # Spaces and the parts of one letter may vanish on the way to tokens; no other character does.
            num_chars = min(
                len("".join(given.split())) for given in (text, unicodedata.normalize("NFC", text))
            )
            at_least = -(-num_chars // self._token_chars)
            if at_least > most:
                raise TooManyTokensError(at_least)
        ids = self._encode(text)
        if most is not None and len(ids) > most:
            raise TooManyTokensError(len(ids))
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _self_test(self) -> str:
        """Returns the role in which the template takes a tool's answer.

        Raises:
            ModelError: the template takes it in no role.
        """
        faults = []
        for role in ("tool", "user"):
            self.tool_role = role
            try:
                fault = self._fault(role)
            except Exception as error:  # noqa: BLE001  a template may raise anything
                fault = f"it raises {type(error).__name__}: {error}"
            if not fault:
                return role
            faults.append(f"role {role}: {fault}")
        raise ModelError(
            f"the chat template cannot carry several turns: {'; '.join(faults)}. Take a model whose template "
            "knows tools, or mend the template (docs/environments.md says what is asked of it)"
        )

    def _fault(self, role: str) -> str:
        opening = self._render([{"role": "user", "content": _QUESTION}])
        opening = opening[opening.index(_QUESTION) + len(_QUESTION) :]
        for answers in (["ANSWER1Q"], ["ANSWER1Q", "ANSWER2Q"]):
            messages = [self.plain(Message(role="tool", content=answer, name="t")) for answer in answers]
            text = self._between(messages, _QUESTION)
            places = [text.find(answer) for answer in answers]
            if -1 in places or places != sorted(places) or any(text.count(answer) > 1 for answer in answers):
                return "it does not write each answer once, in order"
            if text != self._between(messages, f"{_QUESTION} and more"):
                return "what it writes after a turn depends on what came before"
            turn_opening = text[text.index(answers[-1]) + len(answers[-1]) :]
            last = max((opening.rfind(end) + len(end) for end in self._ends if end in opening), default=0)
            if not turn_opening.endswith(opening[last:].strip("\n")) and not turn_opening.endswith(
                opening[last:]
            ):
                return f"a later turn opens with {turn_opening[-40:]!r}, the first one with {opening[-40:]!r}"
        return ""


def _broken(text: str, specials: Sequence[str]) -> str:
    for special in specials:
        if special in text:
            text = text.replace(special, f"{special[0]} {special[1:]}")
    return text


def _longest_token(vocabulary: Mapping[str, int]) -> int:
    """Returns the largest number of characters that one token can stand for; 0 if there is no limit.

    If every byte has a token, each character is in a token of its own or in one with a known text. Otherwise
    a token for unknown text may stand for a whole word.
    """
    has_bytes = "<0x00>" in vocabulary and "<0xFF>" in vocabulary
    has_letters = vocabulary.keys() >= _BYTE_LETTERS
    return max(map(len, vocabulary)) if has_bytes or has_letters else 0
