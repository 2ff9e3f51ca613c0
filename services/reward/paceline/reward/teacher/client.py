"""The calls to a teacher behind vLLM's OpenAI server: what it is, and its likeliest tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.config.training.teacher import TeacherConfig
from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.text import one_line
from paceline.reward.outside.openai_server import OpenAIServer, key_from, read_json
from paceline.reward.teacher.answer import read_top_k
from paceline.reward.teacher.policy_tokens import PolicyTokens
from paceline.service.threads import in_thread

_BYTES_PER_LOG_PROB = 512
"""Of JSON, with the token's text: 90 are usual."""

_FRAME_BYTES = 2**20


class TeacherClient:
    """Calls a teacher, and says what is wrong with one that does not fit the policy.

    Raises:
        ConfigError: the variable with the key is not set.
    """

    def __init__(self, config: TeacherConfig) -> None:
        key = key_from(config.key_env, "algorithm.teacher")
        self._config, self._server = config, OpenAIServer(config.address, key, timeout_s=config.timeout_s)

    async def compare(self, tokens: PolicyTokens) -> None:
        """Checks that the teacher can be asked about the policy's samples.

        Raises:
            RewardError: TIMEOUT or UNAVAILABLE if it does not answer; WRONG_TYPE or RAISED, with a sentence,
                if it is no teacher for this policy.
        """
        await self._check_model(tokens.longest)
        await self._check_tokenizer(tokens)
        try:
            await self.top_k(tokens.probe_ids[:2], [1])
        except RewardError as error:
            if error.kind is RewardErrorKind.RAISED:
                raise _unfit(
                    f"refuses algorithm.teacher.top_k={self._config.top_k}: {error}; start its server with "
                    f"--max-logprobs {self._config.top_k}, or lower top_k"
                ) from error
            raise

    async def top_k(self, token_ids: Sequence[int], wanted: Sequence[int]) -> TeacherTopK:
        """Returns the likeliest tokens at the places `wanted` of a sequence, as `read_top_k` does.

        Raises:
            RewardError: TIMEOUT or UNAVAILABLE if another call may succeed, else RAISED or WRONG_TYPE.
        """
        top_k = self._config.top_k
        body = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
            "return_tokens_as_token_ids": True,
        }
        most = _FRAME_BYTES + len(token_ids) * (top_k + 1) * _BYTES_PER_LOG_PROB
        content = await self._server.call("completions", body, max_bytes=most)
        # In a thread: a long sequence has hundreds of thousands of log-probs.
        return await in_thread(read_top_k, content, token_ids, wanted, top_k)

    async def close(self) -> None:
        """Closes the connections to the teacher."""
        await self._server.close()

    async def _check_model(self, longest: int) -> None:
        cards = _items(read_json(await self._server.call("models")), "data")
        names = [card.get("id") for card in cards if isinstance(card, dict)]
        if self._config.model not in names:
            raise _unfit(
                f"serves no model {self._config.model!r}, but {', '.join(map(str, names)) or 'none'}; "
                "correct algorithm.teacher.model"
            )
        most = cards[names.index(self._config.model)].get("max_model_len")
        # vLLM generates at least one token.
        if isinstance(most, int) and most < longest + 1:
            raise _unfit(
                f"takes up to {most} tokens, and samples have up to {longest} and one more; start it with "
                f"--max-model-len {longest + 1}, or lower data.max_prompt_length or data.max_response_length"
            )

    async def _check_tokenizer(self, tokens: PolicyTokens) -> None:
        body = {"model": self._config.model, "prompt": tokens.probe, "add_special_tokens": False}
        given = _items(read_json(await self._server.call("../tokenize", body)), "tokens")
        if tuple(given) != tokens.probe_ids:
            raise _unfit(
                f"has another tokenizer than the policy: a probe text has {len(given)} tokens there and "
                f"{len(tokens.probe_ids)} here, or other ones; its log-probs would be of other texts. Take a "
                "teacher with the policy's tokenizer, such as a larger model of its family"
            )


def _items(tree: Any, name: str) -> list[Any]:
    """Returns a list in an answer's JSON.

    Raises:
        RewardError: WRONG_TYPE, if there is none.
    """
    items = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(items, list):
        raise _unfit(f"does not answer as vLLM's OpenAI server does: no list {name!r} in its answer")
    return items


def _unfit(sentence: str) -> RewardError:
    return RewardError(one_line(f"it {sentence}"), kind=RewardErrorKind.WRONG_TYPE)
