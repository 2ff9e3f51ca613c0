"""Reads the drawn tokens of requests that AsyncLLM has not answered yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.samples.trajectory import FinishReason, Int32Array
from paceline.rollout.engines.base import Sample
from paceline.rollout.engines.vllm.sampling.log_probs import Versions

Read = Callable[[list[str], list[int], list[int]], Awaitable[tuple[bytes, list[Versions], list[bool]]]]
"""Takes AsyncLLM's names of requests and, for each, the position of its first value and the number of values.
It returns float32 log-probabilities and versions of the requests that the workers know, and a flag per
request that says whether they know it."""


class UnderWay:
    """Requests from their submission until `generate` returns, by Paceline's ids.

    Args:
        state_of: returns the state of a request in AsyncLLM's output processor, by AsyncLLM's name; None if
            there is none. The requests ask for final outputs only, so the processor collects the
            tokens in this process.
        read: fetches log-probabilities from the workers, which keep them.
    """

    def __init__(self, state_of: Callable[[str], Any], read: Read) -> None:
        self._state_of, self._read = state_of, read
        self._internal: dict[str, str] = {}
        self._ended: dict[str, Sample] = {}

    def begin(self, request_id: str, internal_id: str) -> None:
        """Notes a request and AsyncLLM's own name of it."""
        self._internal[request_id] = internal_id

    def end(self, request_id: str, sample: Sample) -> None:
        """Notes the sample of a request that has ended."""
        self._ended[request_id] = sample

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forgets requests whose `generate` returns."""
        for request_id in request_ids:
            self._internal.pop(request_id, None)
            self._ended.pop(request_id, None)

    async def drawn(self, wanted: Mapping[str, int]) -> dict[str, Sample]:
        """Fetches the drawn parts of requests under way, by Paceline's ids; see `Engine.drawn`."""
        ended = {
            name: _after(self._ended[name], first) for name, first in wanted.items() if name in self._ended
        }
        ids, starts, parts = [], [], []
        for name in wanted.keys() - ended.keys():
            state = self._state_of(self._internal.get(name, ""))
            token_ids = _token_ids(state, wanted[name])
            if len(token_ids):
                ids.append(name)
                starts.append(state.prompt_len + wanted[name])
                parts.append(token_ids)
        running = await self._of_running(ids, starts, parts) if ids else {}
        return {name: sample for name, sample in (ended | running).items() if len(sample.token_ids)}

    async def _of_running(
        self, ids: list[str], starts: list[int], parts: list[Int32Array]
    ) -> dict[str, Sample]:
        internal = [self._internal[name] for name in ids]
        packed, versions, known = await self._read(internal, starts, [len(part) for part in parts])
        values, told, first, samples = np.frombuffer(packed, dtype=np.float32), iter(versions), 0, {}
        for name, token_ids, is_known in zip(ids, parts, known, strict=True):
            if not is_known:  # the request has ended meanwhile, and its sample will arrive
                continue
            samples[name] = Sample(
                token_ids=token_ids,
                log_probs=values[first : first + len(token_ids)],
                finish_reason=FinishReason.ABORT,
                versions=tuple((begin, version) for begin, version in next(told)),
            )
            first += len(token_ids)
        return samples


def _token_ids(state: Any, first: int) -> Int32Array:
    """Returns the tokens of a request; none if AsyncLLM does not know it."""
    drawn = state.detokenizer.output_token_ids if state is not None and state.detokenizer is not None else []
    return np.asarray(drawn[first:], dtype=np.int32)


def _after(sample: Sample, first: int) -> Sample:
    """Returns a sample without its first tokens."""
    begins: dict[int, int] = {}
    for begin, version in sample.versions:
        begins[max(0, begin - first)] = version
    return replace(
        sample,
        token_ids=sample.token_ids[first:],
        log_probs=sample.log_probs[first:],
        versions=tuple(begins.items()),
    )
