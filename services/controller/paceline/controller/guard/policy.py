"""The guard's policy: decides from a step's readings, the values that its rules compare with their bounds.

readings -> firings -> {only a warning, adjustments of the next steps, rollback, stop}

The policy neither waits nor communicates. Its state is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.config.guard import GuardConfig
from paceline.controller.guard.best_validations import BestValidations
from paceline.core.guard import RULES, Action, Adjustments, Histories, Reading, crossed, describe

_AT_ONCE = (Action.WARN, Action.SKIP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Firing:
    """A rule that fired in a step.

    Attributes:
        actions: the actions taken, the strongest last.
        bound: the bound of the strongest action.
        streak: steps in a row in which the rule has fired, this one included.
        news: whether people are told: for the first firing of a streak, or an action beyond warn and skip.
    """

    reading: Reading
    actions: tuple[Action, ...]
    bound: float
    streak: int
    news: bool

    @property
    def action(self) -> Action:
        """The strongest of the actions that were taken."""
        return self.actions[-1]

    @property
    def sentence(self) -> str:
        """Says in a sentence which actions were taken, and why."""
        unit = "validations" if RULES[self.reading.rule].of_validation else "steps"
        times = f", for {self.streak} {unit} now" if self.streak > 1 else ""
        return f"{self.action.value}: {describe(self.reading, self.bound, self.action)}{times}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardDecision:
    """The decision that follows from a step's readings.

    Attributes:
        good: whether no bound but those of warnings was crossed; a rollback may then return to this step.
        due: why a validation requires a rollback; "" if none does.
        before: the step of that validation, whose weights a rollback must not take; None without one.
        stop: why the run must end; "" if it may go on.
    """

    firings: tuple[Firing, ...] = ()
    good: bool = True
    rollback: bool = False
    due: str = ""
    before: int | None = None
    stop: str = ""

    @property
    def reason(self) -> str:
        """Why a rollback is due."""
        own = [firing.sentence for firing in self.firings if Action.ROLLBACK in firing.actions]
        return "; ".join([*([self.due] if self.due else []), *own])


@dataclass(kw_only=True, slots=True)
class RuleTally:
    """How often a rule fired over the run, and its worst reading."""

    steps: int = 0
    skipped: int = 0
    worst_step: int = 0
    worst: float = 0.0
    badness: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Streaks:
    """Counts of consecutive steps.

    Attributes:
        firing: steps in which a rule fired, by rule and network.
        waiting: steps in which an action's bound was crossed since the action was last taken, by rule,
            network and action.
    """

    firing: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)

    def without(self, ends: Callable[[str, str], bool]) -> _Streaks:
        """Returns the streaks that go on: those for which `ends(rule, network)` is false."""

        def go_on(streaks: Mapping[str, int]) -> dict[str, int]:
            return {key: n for key, n in streaks.items() if not ends(*key.split("/")[:2])}

        return _Streaks(firing=go_on(self.firing), waiting=go_on(self.waiting))


class GuardPolicy:
    """Judges one step after another.

    Args:
        kl_coef: the coefficient of `fixed_kl` if the configuration names none.
    """

    def __init__(self, config: GuardConfig, *, kl_coef: float) -> None:
        self._config, self._limits = config, config.limits
        self._fixed_kl = kl_coef if config.fixed_kl_coef is None else config.fixed_kl_coef
        self._streaks = _Streaks()
        self.adjustments = Adjustments()
        self.num_rollbacks = 0
        self.best = BestValidations()
        self._due, self._due_step = "", 0
        self.tallies: dict[str, RuleTally] = {}
        self.histories = Histories(window=config.window, min_history=config.min_history)

    @property
    def fallen(self) -> int | None:
        """The step after which a validation required a rollback that is still due; None without one."""
        return self._due_step or None if self._due else None

    def judge(self, step: int, readings: Sequence[Reading]) -> GuardDecision:
        """Judges a finished step by its readings; adjustments take effect from the next step on."""
        decision = self._judge(
            step, readings, lambda rule, network: not RULES[rule].of_validation, due=self._due
        )
        return replace(decision, before=self.fallen)

    def judge_validation(self, step: int, readings: Sequence[Reading]) -> GuardDecision:
        """Judges the validation after a step.

        The step's weights are published already, so a rollback that the validation requires takes place in
        the next step.
        """
        seen = {(reading.rule, reading.network) for reading in readings}
        decision = self._judge(step, readings, lambda rule, network: (rule, network) in seen)
        if decision.rollback:
            self._due, self._due_step = decision.reason, step
        return replace(decision, rollback=False)

    def _judge(
        self, step: int, readings: Sequence[Reading], ends: Callable[[str, str], bool], due: str = ""
    ) -> GuardDecision:
        """Decides by readings. A streak for which `ends(rule, network)` is true ends without a firing."""
        before, self._streaks = self._streaks, self._streaks.without(ends)
        waits = bool(self._streaks.waiting)
        limited = [reading for reading in readings if reading.rule in self._limits]
        judged = [(reading, crossed(self._limits[reading.rule], reading)) for reading in limited]
        firings = [self._fire(step, reading, beyond, before) for reading, beyond in judged if beyond]
        fired = tuple(firing for firing in firings if firing is not None)
        taken = {action for firing in fired for action in firing.actions}
        stop = next((firing.sentence for firing in fired if firing.action is Action.STOP), "")
        if not stop and Action.ROLLBACK in taken and self.num_rollbacks >= self._config.max_rollbacks:
            cause = next(firing.sentence for firing in fired if Action.ROLLBACK in firing.actions)
            stop = f"{cause}; the run went back {self.num_rollbacks} times already (guard.max_rollbacks)"
        rollback = (Action.ROLLBACK in taken or bool(due)) and not stop
        self._adjust(taken - {Action.LOWER_LR} if rollback else taken)
        good = not waits and all(beyond in ((), (Action.WARN,)) for _, beyond in judged)
        return GuardDecision(firings=fired, good=good, rollback=rollback, due=due, stop=stop)

    def rolled_back(self) -> None:
        """Notes a rollback: streaks start from zero, and the next steps use lower learning rates."""
        self.num_rollbacks += 1
        self._streaks, self._due = _Streaks(), ""
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
            key, RuleTally(badness=reading.badness, worst=reading.value, worst_step=step)
        )
        tally.steps += 1
        tally.skipped += reading.num_skipped
        if reading.badness > tally.badness:
            tally.badness, tally.worst, tally.worst_step = reading.badness, reading.value, step

    def _adjust(self, taken: set[Action]) -> None:
        """Makes each adjustment once per step, even if several rules ask for it."""
        if Action.LOWER_LR in taken:
            self._lower_lr()
        if Action.LOWER_KL_COEF in taken:
            scale = max(self._config.min_scale, self.adjustments.kl_scale * self._config.kl_factor)
            self.adjustments = replace(self.adjustments, kl_scale=scale)
        if Action.RAISE_KL_COEF in taken:
            scale = min(self._config.max_kl_scale, self.adjustments.kl_scale / self._config.kl_factor)
            self.adjustments = replace(self.adjustments, kl_scale=scale)
        if Action.LOWER_CLIP in taken:
            scale = max(self._config.min_scale, self.adjustments.clip_scale * self._config.clip_factor)
            self.adjustments = replace(self.adjustments, clip_scale=scale)
        if Action.FIXED_KL in taken:
            self.adjustments = replace(self.adjustments, fixed_kl_coef=self._fixed_kl)

    def _lower_lr(self) -> None:
        scale = max(self._config.min_scale, self.adjustments.lr_scale * self._config.lr_factor)
        self.adjustments = replace(self.adjustments, lr_scale=scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain values."""
        return {
            "adjustments": asdict(self.adjustments),
            "num_rollbacks": self.num_rollbacks,
            "streaks": asdict(self._streaks),
            "tallies": {key: asdict(tally) for key, tally in self.tallies.items()},
            "histories": self.histories.state_dict(),
            "best": self.best.state_dict(),
            "due": self._due,
            **({"due_step": self._due_step} if self._due else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state in a checkpoint; {} changes nothing."""
        if not state:
            return
        self.adjustments = Adjustments(**state["adjustments"])
        self.num_rollbacks = int(state["num_rollbacks"])
        self._streaks = _Streaks(**state["streaks"])
        self.tallies = {key: RuleTally(**tally) for key, tally in state["tallies"].items()}
        self.histories.load_state_dict(state["histories"])
        self.best.load_state_dict(state["best"])
        self._due, self._due_step = str(state["due"]), int(state.get("due_step", 0))
