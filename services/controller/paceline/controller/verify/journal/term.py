"""What the event `run` tells `paceline verify` of a term's settings, which may change with each term."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from paceline.config.reward import ShapedConfig
from paceline.config.run import RunConfig
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.core.samples.trajectory import SCHEMA_VERSION
from paceline.data.cursor import PromptCursor

Shape = tuple[float, float | None, float | None]
"""A scorer's weight in the reward, and the range that its value is clipped to before."""

_MOST_RANGES = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """The settings of one term.

    Attributes:
        num_samples: of each prompt.
        on_cpu: whether the same batch gives the same weights to the bit.
        save_trajectories: whether steps leave files of their trajectories.
        limits: by phase, the longest time in seconds without an event.
        shapes: of the scorers, by component; empty where a row's own columns weight them.
        schema: of the messages; the digests of trajectories are taken over them. 0: not known.
        cursor: seed, batch size and shuffling of the walk over the prompts; None where it is not known.
        prompt_ranges: first and last id of each run of prompt ids without gaps.
        is_recorded: whether the journal says all this; if not, the configuration does.
    """

    num_samples: int
    on_cpu: bool
    save_trajectories: bool
    limits: Mapping[str, float]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    schema: int = 0
    cursor: Mapping[str, Any] | None = None
    prompt_ranges: Sequence[tuple[int, int]] = ()
    is_recorded: bool = False

    @classmethod
    def of(cls, config: RunConfig, prompt_ids: Iterable[int]) -> Self:
        """The settings of a term that begins."""
        ranges = _ranges(prompt_ids)
        seed = config.trainer.seed if config.data.seed is None else config.data.seed
        walk = {"seed": seed, "batch_size": config.data.train_batch_size, "shuffle": config.data.shuffle}
        return cls(
            **_old(config),
            shapes=_shapes(config),
            schema=SCHEMA_VERSION,
            cursor=walk if 0 < len(ranges) <= _MOST_RANGES else None,
            prompt_ranges=ranges if len(ranges) <= _MOST_RANGES else (),
            is_recorded=True,
        )

    @classmethod
    def read(cls, entry: JournalEntry, config: RunConfig) -> Self:
        """The settings in an event `run`; those of the configuration where it is from before it had any."""
        plain = entry.get("verify")
        if plain is None:
            return cls(**_old(config))
        # A later version may have written more.
        known = {name: value for name, value in plain.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "is_recorded": True})

    def to_plain(self) -> dict[str, Any]:
        """Returns the term as it stands in the journal."""
        plain = asdict(self)
        del plain["is_recorded"]
        return plain

    def note_unseen(self, findings: Findings) -> None:
        """Notes what cannot be looked at with these settings."""
        unseen = findings.unseen
        if not self.is_recorded:
            unseen[
                "validations, prompts' order and files' digests of a term from before the journal had them"
            ] += 1
            return
        if self.cursor is None:
            unseen["the order of the prompts, whose ids have too many gaps to be in the journal"] += 1
        if not self.save_trajectories:
            unseen["tokens and components of a term with trainer.save_trajectories: false"] += 1
        if not self.shapes:
            unseen["components against rewards of a term whose rows weight them (weight_key)"] += 1

    def prompt_cursor(self) -> PromptCursor | None:
        """The walk over the prompts, at its beginning; None where it is not known."""
        if self.cursor is None:
            return None
        ids = [i for first, last in self.prompt_ranges for i in range(first, last + 1)]
        return PromptCursor(ids, **self.cursor)


def _old(config: RunConfig) -> dict[str, Any]:
    """What a configuration says without the journal."""
    return {
        "num_samples": config.rollout.n,
        "on_cpu": config.learner.device == "cpu",
        "save_trajectories": config.trainer.save_trajectories,
        "limits": _limits(config),
    }


def _limits(config: RunConfig) -> dict[str, float]:
    """Per phase, the longest time in seconds that it may be without an event."""
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


def _shapes(config: RunConfig) -> dict[str, Shape]:
    reward = config.reward
    named: dict[str, ShapedConfig] = dict(zip(reward.function_names, reward.functions, strict=True))
    for kind in (reward.services, reward.attached, reward.models, reward.judges, reward.code):
        named |= {scorer.name: scorer for scorer in kind}
    if any(scorer.weight_key is not None for scorer in named.values()):
        return {}
    shapes: dict[str, Shape] = {n: (s.weight, s.min_value, s.max_value) for n, s in named.items()}
    return shapes | {"environment": (reward.environment_weight, None, None)}


def _ranges(prompt_ids: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for i in sorted(prompt_ids):
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1] = (ranges[-1][0], i)
        else:
            ranges.append((i, i))
    return ranges
