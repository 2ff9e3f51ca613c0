"""A teacher that speaks the protocol of vLLM's OpenAI server, as far as Paceline uses it.

Its distributions follow from the tokens so far, so a test can compute them without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

Answer = tuple[int, bytes]


def log_probs_after(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """The teacher's log-probs of the next token, (V,)."""
    generator = np.random.default_rng(list(token_ids))
    logits = 3.0 * generator.standard_normal(vocab_size)
    return (logits - np.logaddexp.reduce(logits)).astype(np.float32)


class FakeTeacher:
    """Answers /v1/models, /tokenize and /v1/completions; records the bodies of completions.

    Args:
        encode: the tokenizer.

    Attributes:
        spoil: changes the tree of a completion before it is sent; may be replaced at any time.
        refuse: the status of the next calls; 0 for none.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        *,
        vocab_size: int = 50,
        max_model_len: int = 1000,
        max_logprobs: int = 20,
        model: str = "big",
    ) -> None:
        self._encode, self._vocab_size, self._model = encode, vocab_size, model
        self._max_model_len, self._max_logprobs = max_model_len, max_logprobs
        self.completions: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[str] = []
        self.refuse = 0
        self.spoil: Callable[[dict[str, Any]], None] = lambda tree: None
        self._writers: set[asyncio.StreamWriter] = set()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Returns status and content."""
        self.paths.append(path)
        if self.refuse:
            return _error(self.refuse, "the engine is dead")
        if path == "/v1/models":
            card = {"id": self._model, "object": "model", "max_model_len": self._max_model_len}
            return _content({"object": "list", "data": [card]})
        if body.get("model") != self._model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            tokens = list(self._encode(body["prompt"]))
            return _content({"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens})
        assert path == "/v1/completions"
        return self._completion(body)

    def _completion(self, body: dict[str, Any]) -> Answer:
        self.completions.append(body)
        prompt, top_k = body["prompt"], body["prompt_logprobs"]
        assert body["return_tokens_as_token_ids"] is True
        if top_k > self._max_logprobs:
            most = f"max allowed: {self._max_logprobs}"
            return _error(400, f"Requested prompt logprobs of {top_k}, which is greater than {most}")
        if len(prompt) + body["max_tokens"] > self._max_model_len:
            return _error(400, f"This model's maximum context length is {self._max_model_len} tokens.")
        places = [None, *(self._entry(prompt[:end], prompt[end], top_k) for end in range(1, len(prompt)))]
        tree = {
            "object": "text_completion",
            "model": self._model,
            "choices": [{"index": 0, "text": "!", "finish_reason": "length", "prompt_logprobs": places}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1},
        }
        self.spoil(tree)
        return _content(tree)

    def _entry(self, before: Sequence[int], own: int, top_k: int) -> dict[str, Any]:
        """As vLLM: the sequence's own token first, then the likeliest by rank, each once."""
        log_probs = log_probs_after(before, self._vocab_size)
        order = np.argsort(-log_probs)
        ranks = {int(token): rank for rank, token in enumerate(order, 1)}
        tokens = dict.fromkeys([own, *order[:top_k].tolist()])
        return {
            str(token): {
                "logprob": float(log_probs[token]),
                "rank": ranks[token],
                "decoded_token": f"token_id:{token}",
            }
            for token in tokens
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the calls of one connection."""
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                lengths = [
                    x.split(":")[1] for x in head.splitlines() if x.lower().startswith("content-length")
                ]
                body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
                self.headers.append(head)
                status, content = self.answer(path, body)
                frame = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                writer.write(frame + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def hang_up(self) -> None:
        """Closes all connections."""
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def serving(teacher: FakeTeacher, port: int = 0) -> AsyncIterator[int]:
    """Serves a teacher within it; yields the port."""
    async with await asyncio.start_server(teacher.serve, "127.0.0.1", port) as server:
        yield server.sockets[0].getsockname()[1]
        teacher.hang_up()


def _content(tree: object) -> Answer:
    return 200, json.dumps(tree).encode()


def _error(status: int, message: str) -> Answer:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return status, json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
