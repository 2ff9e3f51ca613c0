"""The seam to the inference engine: what a rollout server asks of whatever draws its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.trajectory import FinishReason, Float32Array, Int32Array, SamplingSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRequest:
    """One sample to draw.

    `request_id` is unique among the requests under way. `sampling.stop_token_ids` are all the tokens that end the response;
    `cache_salt` keeps prefixes that were computed under other weights from being reused.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingSpec
    seed: int
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """What was drawn: tokens (R,) and their natural-log probabilities (R,) under the distribution drawn from.

    Greedy tokens carry the log-probabilities of temperature 1. A token that ended the response is part of it. R is 0 only
    where the engine gave the request up before its first token.
    """

    token_ids: Int32Array
    log_probs: Float32Array
    finish_reason: FinishReason


def do_nothing() -> None:
    """For callers of `generate` that do not count."""


class Engine(Protocol):
    """An inference engine with weights that are pushed into it.

    The same request drawn twice with the same weights gives the same sample, whatever else is under way.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Draws all samples, in the order of the requests. Cancelling it aborts them at once.

        Args:
            ended: called as each sample ends, in whatever order they do.

        Raises:
            PeerLostError: the engine died.
            InvalidMessageError: a request cannot be run, say a prompt that is too long.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False where requests that use them are under way."""
        ...

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """Calls a method of the worker extension on every rank; one result per rank.

        Arguments and results are plain values (int, float, str, bytes, list, dict).

        Raises:
            PeerLostError: the engine died.
            WeightSyncError: the method raised on a rank.
        """
        ...

    async def check_health(self) -> None:
        """Raises PeerLostError where the engine has died."""
        ...

    async def shutdown(self) -> None:
        """Ends the engine and every process of it."""
        ...
