"""A term's settings, which the event `run` records for `paceline verify`; they may change with each term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from paceline.config.mixture import WeightsFrom
from paceline.config.reward import RewardConfig
from paceline.config.run import RunConfig
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.core.samples.replay import ReplayRule
from paceline.core.samples.trajectory import SCHEMA_VERSION
from paceline.data.mixture import PromptMixture

Shape = tuple[float, float | None, float | None]
"""A scorer's weight in the reward, and the bounds to which its value is clipped before (None: no bound)."""

_MOST_RANGES = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """The settings of one term.

    Attributes:
        on_cpu: whether the same batch gives the same weights to the bit.
        save_trajectories: whether steps write their trajectories to files.
        limits: longest time in seconds without an event, by phase.
        max_staleness: the number of policy versions by which a batch may be older than the weights that its
            step trains.
        in_flight: `rollout.in_flight`: whether a push may change the weights during an answer.
        replay: the fields of the `ReplayRule`, which says what a step trains again; None without replay.
        shapes: the scorers' shapes, by component; empty if columns of a row weight them.
        val_shapes: the scorers' shapes for the sets of held-out prompts that have a reward of their own.
        schema: the schema version of the messages, whose bytes enter the digests of trajectories; 0: not
            known.
        cursor: seed, batch size and shuffling of the draw of prompts; None if not known.
        prompt_sets: each training set's name and its ranges of consecutive prompt ids: first id, last id and
            rank.
        schedule: pairs of a step and the sets' weights from this step on.
        weights_chosen: whether the user's function chooses the weights after each step.
        is_recorded: whether these settings come from the journal; if not, they come from the configuration.
    """

    num_samples: int
    on_cpu: bool
    save_trajectories: bool
    limits: Mapping[str, float]
    max_staleness: int = 0
    in_flight: str = "wait"
    replay: Mapping[str, Any] | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    val_shapes: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)
    schema: int = 0
    cursor: Mapping[str, Any] | None = None
    prompt_sets: Sequence[tuple[str, Sequence[Sequence[int]]]] = ()
    schedule: Sequence[tuple[int, Sequence[float]]] = ()
    weights_chosen: bool = False
    is_recorded: bool = False

    @property
    def mixes_versions(self) -> bool:
        """Whether several versions may have sampled a trajectory."""
        return self.in_flight != "wait"

    @property
    def replay_rule(self) -> ReplayRule | None:
        """What a step may train again; None: nothing."""
        return None if self.replay is None else ReplayRule.from_plain(self.replay)

    @classmethod
    def of(cls, config: RunConfig, mixture: PromptMixture) -> Self:
        """Returns the settings of a new term."""
        data, ranges = config.data, mixture.ranges()
        is_known = sum(map(len, ranges)) <= _MOST_RANGES
        draw = {
            "seed": config.prompt_seed,
            "batch_size": data.train_batch_size,
            "shuffle": data.shuffle,
        }
        return cls(
            **_old(config),
            shapes=_shapes(config.reward),
            val_shapes={name: _shapes(reward) for name, reward in config.val_rewards.items()},
            schema=SCHEMA_VERSION,
            cursor=draw if is_known else None,
            prompt_sets=list(zip(mixture.names, ranges, strict=True)) if is_known else (),
            schedule=[(stage.step, stage.weights) for stage in data.weights_by_step],
            weights_chosen=isinstance(data.curriculum, str),
            is_recorded=True,
        )

    @classmethod
    def read(cls, entry: JournalEntry, config: RunConfig) -> Self:
        """Reads the settings in an event `run`; takes those of `config` if an old event has none."""
        plain = entry.get("verify")
        if plain is None:
            return cls(**_old(config))
        if "prompt_ranges" in plain:  # Written before there could be several sets.
            plain = {**plain, "prompt_sets": [("", plain["prompt_ranges"])]}
        # A later version may have written further settings.
        known = {name: value for name, value in plain.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "is_recorded": True})

    def to_plain(self) -> dict[str, Any]:
        """Returns the term as it stands in the journal."""
        plain = asdict(self)
        del plain["is_recorded"]
        if not self.mixes_versions:
            del plain["in_flight"]
        if self.replay is None:
            del plain["replay"]
        if not self.val_shapes:
            del plain["val_shapes"]
        return plain

    def note_unseen(self, findings: Findings) -> None:
        """Notes the checks that are impossible with these settings."""
        unseen = findings.unseen
        if not self.is_recorded:
            unseen[
                "validations, the order of prompts and digests of files of a term, which its journal does "
                "not record"
            ] += 1
            return
        if self.cursor is None:
            unseen["the order of the prompts, whose ids have too many gaps to be in the journal"] += 1
        elif self.weights_chosen:
            unseen[
                "how data.curriculum chose the weights; the prompts drawn with these weights were checked"
            ] += 1
        if not self.save_trajectories:
            unseen["tokens and components of a term with trainer.save_trajectories: false"] += 1
        if not all((self.shapes, *self.val_shapes.values())):
            unseen["whether components add up to rewards in a term whose rows weight them (weight_key)"] += 1

    def mixture(self) -> PromptMixture | None:
        """Returns the draw of prompts, at its beginning; None if not known."""
        if self.cursor is None:
            return None
        sets: dict[str, list[int]] = {}
        ranks: dict[int, int] = {}
        for name, ranges in self.prompt_sets:
            ids = sets.setdefault(name, [])
            for first, last, *rank in ranges:
                ids.extend(range(first, last + 1))
                ranks.update(dict.fromkeys(range(first, last + 1), *rank or [0]))
        schedule = [WeightsFrom(step=step, weights=tuple(weights)) for step, weights in self.schedule]
        return PromptMixture(sets, ranks=ranks, schedule=schedule, **self.cursor)


def check_start(before: JournalEntry | None, entry: JournalEntry, findings: Findings) -> None:
    """Checks an event `run` against the one of the term before; notes code of users that has changed."""
    expected = 1 if before is None else int(before["term"]) + 1
    if int(entry["term"]) != expected:
        findings.record(f"a term {entry['term']} begins where {expected} is due", before, entry)
    for key in ("run_id", "data_digest"):
        if before is not None and before.get(key) != entry.get(key):
            findings.record(f"term {entry['term']} has another {key} than the term before", before, entry)
    known = before.get("code", {}) if before is not None else {}
    for key, own in entry.get("code", {}).items():
        if own != known.get(key):
            digest = own[1] or "is not on the controller's host"
            findings.code.append(f"from term {entry['term']} on: {key}={own[0]}, file {digest}")


def _old(config: RunConfig) -> dict[str, Any]:
    """Returns the settings of a configuration, if the journal has none."""
    return {
        "num_samples": config.rollout.n,
        "on_cpu": config.learner.device == "cpu",
        "save_trajectories": config.trainer.save_trajectories,
        "limits": _limits(config),
        "max_staleness": config.barrier.bound,
        "in_flight": config.rollout.in_flight,
        "replay": None if config.replay_rule is None else asdict(config.replay_rule),
    }


def _limits(config: RunConfig) -> dict[str, float]:
    """Returns the longest time in seconds without an event, by phase."""
    push = config.weights.push_timeout_s + config.weights.join_timeout_s
    collection = config.collect_timeout_s + config.service.recovery_timeout_s + config.broker.outage_timeout_s
    return {
        "starting": config.service.startup_timeout_s,
        # The run waits this long for a member that was lost.
        "forming": max(config.service.startup_timeout_s, config.service.recovery_timeout_s)
        + config.weights.join_timeout_s,
        "dispatch": config.stall_timeout_s + config.broker.outage_timeout_s,
        "collect": collection,
        "validate": collection,
        "learn": config.learner.command_timeout_s,
        "rollback": config.learner.command_timeout_s,
        "checkpoint": config.learner.command_timeout_s,
        "publish": push,
        "commit": config.service.rpc_timeout_s + push,
    }


def _shapes(reward: RewardConfig) -> dict[str, Shape]:
    named = reward.named_scorers
    if any(scorer.weight_key is not None for scorer in named.values()):
        return {}
    shapes: dict[str, Shape] = {n: (s.weight, s.min_value, s.max_value) for n, s in named.items()}
    return shapes | {"environment": (reward.environment_weight, None, None)}
