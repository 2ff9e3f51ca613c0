"""From a step's readings to what is done about them: streaks, patience, adjustments, rollbacks counted. Pure; its state is part of the checkpoint.

readings -> firings -> {nothing more, adjustments of the next steps, rollback, stop}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.config.guard import GuardConfig
from paceline.core.guard import Action, Adjustments, Histories, Reading, crossed, describe

_AT_ONCE = (Action.WARN, Action.SKIP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Firing:
    """A rule that fired in a step.

    Attributes:
        actions: those that are taken, the strongest last.
        bound: of the strongest.
        streak: steps in a row in which the rule has fired, this one included.
        news: whether people should be told: the first of a streak, or more than a warning or a skip.
    """

    reading: Reading
    actions: tuple[Action, ...]
    bound: float
    streak: int
    news: bool

    @property
    def action(self) -> Action:
        """The strongest that is taken."""
        return self.actions[-1]

    @property
    def sentence(self) -> str:
        """For people."""
        times = f", for {self.streak} steps now" if self.streak > 1 else ""
        return f"{self.action.value}: {describe(self.reading, self.bound, self.action)}{times}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardDecision:
    """What a step's readings ask for. `good`: no bound but those of warnings was crossed, so that one may go back to a checkpoint of this step."""

    firings: tuple[Firing, ...] = ()
    good: bool = True
    rollback: bool = False
    stop: str = ""

    @property
    def reason(self) -> str:
        """Why a rollback is asked for."""
        return "; ".join(one.sentence for one in self.firings if Action.ROLLBACK in one.actions)


@dataclass(kw_only=True, slots=True)
class Tally:
    """How a rule has fared over the run."""

    steps: int = 0
    skipped: int = 0
    worst_step: int = 0
    worst: float = 0.0
    badness: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Streaks:
    """Steps in a row: by rule and network, and of those the ones that crossed an action's bound since it was last taken."""

    firing: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)


class GuardPolicy:
    """Judges one step after another.

    Args:
        config: bounds and factors.
        kl_coef: what `fixed_kl` falls back to where the configuration names no coefficient.
    """

    def __init__(self, config: GuardConfig, *, kl_coef: float) -> None:
        self._config, self._limits = config, config.limits
        self._fixed_kl = kl_coef if config.fixed_kl_coef is None else config.fixed_kl_coef
        self._streaks = _Streaks()
        self.adjustments = Adjustments()
        self.num_rollbacks = 0
        self.tallies: dict[str, Tally] = {}
        self.histories = Histories(window=config.window, min_history=config.min_history)

    def judge(self, step: int, readings: Sequence[Reading]) -> GuardDecision:
        """Takes a finished step's readings in; adjustments are in force from the next step on."""
        before, self._streaks = self._streaks, _Streaks()
        judged = [(one, crossed(self._limits[one.rule], one)) for one in readings if one.rule in self._limits]
        firings = [self._fire(step, one, beyond, before) for one, beyond in judged if beyond]
        fired = tuple(firing for firing in firings if firing is not None)
        taken = {action for firing in fired for action in firing.actions}
        stop = next((firing.sentence for firing in fired if firing.action is Action.STOP), "")
        if not stop and Action.ROLLBACK in taken and self.num_rollbacks >= self._config.max_rollbacks:
            cause = next(firing.sentence for firing in fired if Action.ROLLBACK in firing.actions)
            stop = f"{cause}; the run went back {self.num_rollbacks} times already (guard.max_rollbacks)"
        rollback = Action.ROLLBACK in taken and not stop
        self._adjust(taken - {Action.LOWER_LR} if rollback else taken)
        good = all(beyond in ((), (Action.WARN,)) for _, beyond in judged)
        return GuardDecision(firings=fired, good=good, rollback=rollback, stop=stop)

    def rolled_back(self) -> None:
        """The weights are those of an earlier step: streaks mean nothing any more, and the next steps go slower."""
        self.num_rollbacks += 1
        self._streaks = _Streaks()
        self._lower_lr()

    def _fire(self, step: int, reading: Reading, beyond: Sequence[Action], before: _Streaks) -> Firing | None:
        limits = self._limits[reading.rule]
        key = f"{reading.rule}/{reading.network}"
        streak = self._streaks.firing[key] = before.firing.get(key, 0) + 1
        taken = tuple(action for action in beyond if self._is_due(action, key, limits.patience, before))
        self._count(step, key, reading)
        if not taken:
            return None
        return Firing(
            reading=reading,
            actions=taken,
            bound=limits.bounds[taken[-1]],
            streak=streak,
            news=streak == 1 or taken[-1] not in _AT_ONCE,
        )

    def _is_due(self, action: Action, key: str, patience: int, before: _Streaks) -> bool:
        if action in _AT_ONCE:
            return True
        place = f"{key}/{action.value}"
        waited = before.waiting.get(place, 0) + 1
        if waited < patience:
            self._streaks.waiting[place] = waited
        return waited >= patience

    def _count(self, step: int, key: str, reading: Reading) -> None:
        tally = self.tallies.setdefault(
            key, Tally(badness=reading.badness, worst=reading.value, worst_step=step)
        )
        tally.steps += 1
        tally.skipped += reading.num_skipped
        if reading.badness > tally.badness:
            tally.badness, tally.worst, tally.worst_step = reading.badness, reading.value, step

    def _adjust(self, taken: set[Action]) -> None:
        """Each kind once a step, however many rules ask for it."""
        if Action.LOWER_LR in taken:
            self._lower_lr()
        if Action.LOWER_KL_COEF in taken:
            scale = max(self._config.min_scale, self.adjustments.kl_scale * self._config.kl_factor)
            self.adjustments = replace(self.adjustments, kl_scale=scale)
        if Action.FIXED_KL in taken:
            self.adjustments = replace(self.adjustments, fixed_kl_coef=self._fixed_kl)

    def _lower_lr(self) -> None:
        scale = max(self._config.min_scale, self.adjustments.lr_scale * self._config.lr_factor)
        self.adjustments = replace(self.adjustments, lr_scale=scale)

    # --- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint, as plain values."""
        return {
            "adjustments": asdict(self.adjustments),
            "num_rollbacks": self.num_rollbacks,
            "streaks": asdict(self._streaks),
            "tallies": {key: asdict(tally) for key, tally in self.tallies.items()},
            "histories": self.histories.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From the checkpoint; {} of one without a guard leaves everything as it begins."""
        if not state:
            return
        self.adjustments = Adjustments(**state["adjustments"])
        self.num_rollbacks = int(state["num_rollbacks"])
        self._streaks = _Streaks(**state["streaks"])
        self.tallies = {key: Tally(**tally) for key, tally in state["tallies"].items()}
        self.histories.load_state_dict(state["histories"])
