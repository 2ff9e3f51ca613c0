"""The phases of a run and the moves between them."""

from __future__ import annotations

import enum

from paceline.core.errors import IllegalTransitionError


class Phase(enum.Enum):
    """What the sequencer is doing.

    FORMING     waits for members, compares what they hold with the journal, and forms the weight group
    DISPATCH    sends prompts out
    COLLECT     takes scored trajectories in
    LEARN       the learner trains
    ROLLBACK    the learner goes back to the weights of the last good checkpoint
    PUBLISH     weights go to the rollout servers, and digests are compared; no server samples from them
    COMMIT      the version is in the journal; the servers that hold its digest begin to sample from it
    VALIDATE    held-out prompts are answered and scored; with rollout.validation_servers: the run waits for
                that
    CHECKPOINT  the learner writes a checkpoint
    ENDED, FAILED   nothing follows
    """

    STARTING = "starting"
    FORMING = "forming"
    DISPATCH = "dispatch"
    COLLECT = "collect"
    LEARN = "learn"
    ROLLBACK = "rollback"
    PUBLISH = "publish"
    COMMIT = "commit"
    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"
    ENDED = "ended"
    FAILED = "failed"


_BETWEEN_STEPS = {Phase.DISPATCH, Phase.VALIDATE, Phase.CHECKPOINT, Phase.FORMING, Phase.ENDED}

# From every phase of a step a run goes back to FORMING if a member was lost, and from COLLECT and LEARN to
# DISPATCH if the broker has lost the step's data. It goes from LEARN to COLLECT, and then to PUBLISH, if the
# weights wait for the samples of later steps; to VALIDATE, if they wait for an earlier validation.
_MOVES: dict[Phase, set[Phase]] = {
    Phase.STARTING: {Phase.FORMING},
    Phase.FORMING: {Phase.PUBLISH, Phase.DISPATCH, Phase.FORMING, Phase.ENDED},
    Phase.DISPATCH: {Phase.COLLECT, Phase.FORMING},
    Phase.COLLECT: {Phase.LEARN, Phase.DISPATCH, Phase.FORMING, Phase.PUBLISH, Phase.VALIDATE},
    Phase.LEARN: {
        Phase.PUBLISH,
        Phase.FORMING,
        Phase.ROLLBACK,
        Phase.DISPATCH,
        Phase.COLLECT,
        Phase.VALIDATE,
    },
    Phase.ROLLBACK: {Phase.PUBLISH, Phase.FORMING, Phase.VALIDATE},
    Phase.PUBLISH: {Phase.COMMIT, Phase.FORMING},
    Phase.COMMIT: _BETWEEN_STEPS,
    Phase.VALIDATE: _BETWEEN_STEPS - {Phase.VALIDATE} | {Phase.PUBLISH},
    Phase.CHECKPOINT: _BETWEEN_STEPS - {Phase.CHECKPOINT},
    Phase.ENDED: set(),
    Phase.FAILED: set(),
}


def move(current: Phase, to: Phase) -> Phase:
    """Returns `to` if the move from `current` is allowed; every phase that is not final may fail.

    Raises:
        IllegalTransitionError: the move is not allowed; names both phases.
    """
    if to in _MOVES[current] or (to is Phase.FAILED and _MOVES[current]):
        return to
    allowed = ", ".join(sorted(p.name for p in _MOVES[current])) or "none"
    raise IllegalTransitionError(
        f"no move from {current.name} to {to.name}; from {current.name} a run may go to: {allowed}"
    )
