"""The interface between a rollout server and an inference engine: one protocol and its records.

`tests/contract/test_engine.py` checks what is promised here; `docs/where-to-change-what.md` explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import InvalidMessageError
from paceline.core.members import EnginePart
from paceline.core.samples.expert_choices import ChoiceArray
from paceline.core.samples.images import LoadedImage
from paceline.core.samples.trajectory import FinishReason, Float32Array, Int32Array, SamplingSpec
from paceline.weights.digest.agreement import DigestReport
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRequest:
    """Says which sample the engine should draw.

    `request_id` is unique among the requests under way. `sampling.stop_token_ids` are all the tokens that end
    the response. Requests of different `cache_salt` share no cached prefix. `images` are the prompt's, in the
    order of their placeholders. `drawn` are tokens with which the response begins, because they were drawn
    before (`Engine.continues`): fewer than `sampling.max_tokens`, and none of them ends the response.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingSpec
    seed: int
    cache_salt: str = ""
    images: Sequence[LoadedImage] = ()
    drawn: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A drawn response: tokens (R,) and their natural-log probabilities (R,) when they were drawn.

    Greedy tokens carry the log-probabilities of temperature 1. The token that ended the response is part of
    it. R is 0 only if the engine aborted the request before its first token. `versions` has a pair for each
    part of the response that weights of one version drew: the place of its first token, and the version. A
    push in the middle of a response begins a new part. `versions` is empty if the engine does not tell.

    `expert_choices` are those of prompt, given and drawn tokens, in layers with experts, with
    `actor.router_replay`; the last tokens may lack. None if the engine does not tell.
    """

    token_ids: Int32Array
    log_probs: Float32Array
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...] = ()
    expert_choices: ChoiceArray | None = None


def refused(request: SampleRequest, why: object) -> InvalidMessageError:
    """Returns the error for a request that an engine cannot run."""
    text = f"the engine refuses request {request.request_id}: {why}"
    return InvalidMessageError(text, reason="refused_by_engine")


def do_nothing() -> None:
    """Does nothing: the default of `Engine.generate`'s `ended`."""


class Engine(Protocol):
    """An inference engine that gets its weights only by push.

    An engine runs on one or more ranks (tensor parallelism). `describe`, `join`, `receive`, `digest` and
    `leave` concern all of its ranks; the caller orders them one at a time.
    """

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding; every token id is smaller."""

    @property
    def kv_cache_tokens(self) -> int:
        """Number of tokens whose keys and values fit into the cache; 0 if the engine does not report it."""

    async def describe(self) -> tuple[RankLayout, ...]:
        """Returns which part of which checkpoint tensor each rank needs, by rank.

        Raises:
            ModelError: nothing can be pushed into the parameters, because they are quantized, or have more
                than one type besides float32.
        """

    async def join(self, spec: WeightGroupSpec, rank_offset: int, timeout_s: float) -> None:
        """Leaves the current weight group, if any, and joins another, at the same time as its other members.

        Args:
            rank_offset: group rank of this engine's first rank.

        Raises:
            DeadlineError, PeerLostError: a member did not come, or went away.
            WeightSyncError: the spec does not fit this engine.
        """

    async def receive(self, version: int, timeout_s: float) -> PushReceipt:
        """Receives a push into the live parameters. Forgets all cached prefixes unless the engine is paused.

        After an error the parameters may be a mixture of versions: join a group and receive again before the
            next request.

        Returns:
            The receipt of all ranks, with one digest report per rank.

        Raises:
            DeadlineError, PeerLostError: a member stalled or died; the group is gone.
            WeightSyncError: no group has been joined, or requests are under way and not paused.
        """

    async def pause(self, *, recompute: bool) -> None:
        """Stops drawing tokens until `resume`; current and new requests wait.

        Args:
            recompute: forgets all keys and values; those of requests under way are computed again when the
                requests go on. Otherwise all are kept.

        Raises:
            DeadlineError, PeerLostError: the engine hangs, or died.
        """

    async def resume(self) -> None:
        """Continues with the current weights; may be repeated."""

    async def digest(self, version: int) -> tuple[DigestReport, ...]:
        """Returns the digest of the live parameters, one report per rank; `version` only labels the reports.

        Raises:
            WeightSyncError: the parameters do not have the checkpoint's form (`RankLayout` without slices).
        """

    async def leave(self) -> None:
        """Leaves the weight group with all ranks; peers that still wait get an error. May be repeated."""

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Draws all samples, in the order of the requests. Cancelling it aborts them at once.

        The same request drawn twice with the same weights gives the same sample, no matter what
        else is under way.

        Args:
            ended: called once per sample, as each one ends.

        Raises:
            PeerLostError: the engine died.
            InvalidMessageError: a request cannot be run, for example because its prompt is too long. None of
                the others is drawn.
            Exception: any other error is attributed to these requests. The engine's health is checked, and
                they are drawn again.
        """

    @property
    def continues(self) -> bool:
        """Whether a request may begin with tokens that were drawn before, here or in another engine.

        Its `Sample` then has only the tokens that follow. With the same weights, they are the tokens that an
        uninterrupted request would have drawn. No request has both `images` and `drawn`.
        """
        return False

    async def drawn(self, wanted: Mapping[str, int]) -> dict[str, Sample]:
        """Returns the samples of requests under way, as far as they have been drawn, by request id.

        Requests without further tokens are left out. A sample that has ended is included until its `generate`
        returns; an unfinished one has the finish reason ABORT. Called only if the engine `continues`.

        wanted: by request, the number of its first tokens to leave out, not counting `SampleRequest.drawn`.

        Raises:
            DeadlineError, PeerLostError: the engine hangs, or died.
        """
        return {}

    async def sleep(self) -> int:
        """Gives up the GPU memory of weights and KV cache; requests under way are aborted. May be repeated.

        A sleeping engine can neither receive nor generate. It may keep only its captured graphs; parameters
        keep their addresses. On a CPU nothing is freed.

        Returns:
            The most bytes of one GPU that a call of this engine has freed so far; 0 if that is not known.

        Raises:
            DeadlineError, PeerLostError: the engine hangs, or died.
        """

    async def wake(self, part: EnginePart) -> None:
        """Allocates the memory of a part again, without its content: weights need a push. May be repeated.

        Raises:
            DeadlineError, PeerLostError: the engine hangs, or died.
            WeightSyncError: there is not enough free memory.
        """

    async def check_health(self) -> None:
        """Raises PeerLostError if the engine has died, is stopped, or must be restarted."""

    async def shutdown(self) -> None:
        """Ends the engine and all of its processes, also if it has died. May be repeated."""
