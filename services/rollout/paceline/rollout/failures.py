"""Decides whether a prompt group that gets no samples is refused, is given back, or ends the server."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.broker.base import Entry
from paceline.core.errors import InvalidMessageError, LostDataError, NumericsError, PeerLostError
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import GroupRefusal, PromptGroup
from paceline.core.text import one_line
from paceline.rollout.episodes.environment import EnvironmentLostError
from paceline.wire import decode_prompt_group, refusal_of

MAX_FAILED_IN_A_ROW = 8
"""Different prompt groups that may fail one after the other before the engine or its weights are blamed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFailure:
    """Why a group got no samples.

    `reason` is a short stable word. `final`: another attempt, here or elsewhere, would fail the same way.
    `of_engine`: the engine or its weights may be at fault, not the group.
    """

    reason: str
    message: str
    final: bool = False
    of_engine: bool = True


def failure_of(error: Exception) -> GroupFailure:
    """Converts an error of one group's generation to a failure; the engine is alive."""
    message = one_line(str(error))
    match error:
        case InvalidMessageError():
            return GroupFailure(reason=error.reason, message=message, final=True, of_engine=False)
        case EnvironmentLostError():
            return GroupFailure(reason="environment_lost", message=message, of_engine=False)
        case LostDataError():
            return GroupFailure(reason="image_lost", message=message, of_engine=False)
        case NumericsError():
            # Seeds and weights decide the numbers: they would be the same on any server.
            return GroupFailure(reason="not_finite", message=message, final=True)
        case _:
            return GroupFailure(reason="engine_error", message=one_line(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Decides which deliveries are worth an attempt.

    Args:
        policy: the policy that groups are drawn from.
        max_staleness: how many versions older than `policy` a group's policy may be.
        vocab_size: token ids are below it.
        max_deliveries: attempts that a group gets; servers that died during one count too.
    """

    run_id: str
    policy: PolicyTag
    server_id: str
    vocab_size: int
    max_deliveries: int
    max_staleness: int = 0

    def read(self, entry: Entry) -> PromptGroup | GroupFailure | None:
        """Returns an entry's group, or why it cannot be served; None for a version that is over."""
        try:
            group = decode_prompt_group(entry.payload, vocab_size=self.vocab_size)
        except InvalidMessageError as error:
            return failure_of(error)
        if group.run_id != self.run_id:
            message = f"the group is of run {group.run_id}, this server of run {self.run_id}"
            return GroupFailure(reason="wrong_run", message=message, final=True)
        age = self.policy.version - group.policy.version
        if age > self.max_staleness:
            return None
        if age <= 0 and group.policy != self.policy:
            message = f"prompt {group.prompt_id} wants {group.policy}, this server holds {self.policy}"
            return GroupFailure(reason="wrong_policy", message=message, final=True)
        if entry.deliveries > self.max_deliveries:
            message = (
                f"prompt {group.prompt_id} was taken {entry.deliveries - 1} times, and no server has "
                f"answered; rollout.max_deliveries={self.max_deliveries}"
            )
            return GroupFailure(reason="max_deliveries", message=message, final=True)
        return group

    def awaits_push(self, entry: Entry) -> bool:
        """Returns whether a group needs weights that this server will get by a push in mid-answer."""
        if not self.max_staleness:
            return False
        try:
            group = decode_prompt_group(entry.payload, vocab_size=self.vocab_size)
        except InvalidMessageError:
            return False
        return group.run_id == self.run_id and group.policy.version > self.policy.version

    def refusal(self, entry: Entry, failure: GroupFailure) -> GroupRefusal | None:
        """Returns the refusal to send; None if the message does not even tell which group it is."""
        return refusal_of(
            entry.payload,
            server_id=self.server_id,
            reason=failure.reason,
            detail=failure.message,
            deliveries=entry.deliveries,
        )

    def is_suspect(self, entry: Entry) -> bool:
        """Returns whether a group may have killed the servers that took it: half of its attempts are used up.

        It is drawn alone, so that it cannot use up the attempts of other groups as well.
        """
        return entry.deliveries > max(1, self.max_deliveries // 2)

    def gives_back(self, entry: Entry, failure: GroupFailure) -> bool:
        """Returns whether the group is worth another attempt."""
        return not failure.final and entry.deliveries < self.max_deliveries


class FailureStreak:
    """Counts different groups that failed one after the other: many together are not the groups' fault."""

    def __init__(self) -> None:
        self._prompts: set[int] = set()

    def succeeded(self) -> None:
        """Notes that a group got its samples."""
        self._prompts.clear()

    def failed(self, group: PromptGroup, failure: GroupFailure) -> None:
        """Notes a group that has failed.

        Raises:
            NumericsError: the weights are unusable.
            PeerLostError: the engine is unusable.
        """
        if not failure.of_engine:
            return
        self._prompts.add(group.prompt_id)
        if len(self._prompts) < MAX_FAILED_IN_A_ROW:
            return
        message = (
            f"{len(self._prompts)} prompt groups failed one after the other; the last: {failure.message}"
        )
        if failure.reason == "not_finite":
            raise NumericsError(message)
        raise PeerLostError(message, peer="engine")
