"""The faults of `paceline chaos`: their kinds, targets and seeded order. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.engines.registry import engine_facts

REDIS, CONTROLLER = "redis", "controller"
ENGINE, CHILD = "engine", "child"


class FaultKind(enum.Enum):
    """What is done to a target; the value is its name in chaos.jsonl.

    KILL: SIGKILL to a process. PAUSE, LONG_PAUSE: SIGSTOP, and SIGCONT later; long is beyond
    service.dead_after_s. LOSE_DATA: the Redis server comes back empty. FULL: it accepts no more data.
    CUT_CLIENTS, FORGET_SCRIPTS: it closes all connections, or forgets the scripts. DELAY, CUT, HOLE,
    LONG_HOLE: on the network path to the target, every byte is late, all connections are cut, or nothing
    arrives for a while.
    """

    KILL = "kill"
    PAUSE = "pause"
    LONG_PAUSE = "long_pause"
    LOSE_DATA = "lose_data"
    FULL = "full"
    CUT_CLIENTS = "cut_clients"
    FORGET_SCRIPTS = "forget_scripts"
    DELAY = "delay"
    CUT = "cut"
    HOLE = "hole"
    LONG_HOLE = "long_hole"


_OF_PROCESSES = (FaultKind.KILL, FaultKind.PAUSE, FaultKind.LONG_PAUSE)
_OF_REDIS = (FaultKind.LOSE_DATA, FaultKind.FULL, FaultKind.CUT_CLIENTS, FaultKind.FORGET_SCRIPTS)
_OF_LINKS = (FaultKind.DELAY, FaultKind.CUT, FaultKind.HOLE, FaultKind.LONG_HOLE)
_SHORT_S = (1.0, 8.0)
_BEYOND_DEAD_S = (3.0, 8.0)
# How often a deck has a fault; one that restarts an engine or the learner, or causes a long silence, is in it
# once.
_TIMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Names one fault, its kind and its target. `seconds` is how long it lasts; 0 if it happens at once.

    `target` is a process by its name in run.json, "NAME/engine" or "NAME/child" for a process that NAME
    started, or the server at the end of a link.
    """

    kind: FaultKind
    target: str
    seconds: float = 0.0

    @property
    def place(self) -> str:
        """What the fault affects; faults with the same place come one after another."""
        return f"link to {self.target}" if self.kind in _OF_LINKS else self.target

    def __str__(self) -> str:
        return f"{self.kind.value} {self.target}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


def all_faults(config: RunConfig) -> list[tuple[FaultKind, str]]:
    """Returns every kind with every target that it fits."""
    servers = [f"rollout-{i}" for i in range(config.rollout.replicas)]
    processes = [CONTROLLER, *servers, *(f"learner-{i}" for i in range(config.learner.world_size)), "reward"]
    engines = [engine_facts(config.rollout.engine_at(number)) for number in range(len(servers))]
    processes += [
        f"{server}/{ENGINE}" for server, facts in zip(servers, engines, strict=True) if facts.process_word
    ]
    if config.reward.functions:
        processes.append(f"reward/{CHILD}")
    stores = [f"blob-store-{number}" for number in range(config.num_own_stores)]
    return [
        *((kind, target) for kind in _OF_PROCESSES for target in [*processes, REDIS, *stores]),
        *((kind, REDIS) for kind in _OF_REDIS),
        *((kind, target) for kind in _OF_LINKS for target in (REDIS, CONTROLLER)),
    ]


def deck(config: RunConfig, only: Sequence[str] = ()) -> list[tuple[FaultKind, str]]:
    """Returns all of `all_faults`, or those that match one of the patterns; the cheap ones several times.

    Raises:
        ConfigError: a pattern matches no fault.
    """
    faults = all_faults(config)
    for pattern in only:
        if not any(_matches(fault, pattern) for fault in faults):
            words = ", ".join(_words(fault) for fault in faults)
            raise ConfigError(f"--only '{pattern}' matches no fault of this run; there are: {words}")
    return [
        (kind, target)
        for kind, target in faults
        if not only or any(_matches((kind, target), pattern) for pattern in only)
        for _ in range(1 if _costly(kind, target) else _TIMES)
    ]


def draw(config: RunConfig, *, seed: int, only: Sequence[str] = ()) -> Iterator[Fault]:
    """Yields faults endlessly: a `deck` in a random order, then the same in another order."""
    rng, faults = np.random.default_rng(seed), deck(config, only)
    while True:
        for index in rng.permutation(len(faults)):
            kind, target = faults[index]
            yield Fault(kind=kind, target=target, seconds=_duration(kind, config, rng))


def _words(fault: tuple[FaultKind, str]) -> str:
    kind, target = fault
    return f"{kind.value} {target}"


def _matches(fault: tuple[FaultKind, str], pattern: str) -> bool:
    return fnmatchcase(_words(fault), pattern)


def _costly(kind: FaultKind, target: str) -> bool:
    if kind is FaultKind.KILL:
        return target.startswith(("rollout", "learner"))
    return kind in (FaultKind.LONG_PAUSE, FaultKind.LONG_HOLE)


def _duration(kind: FaultKind, config: RunConfig, rng: np.random.Generator) -> float:
    if kind in (FaultKind.LONG_PAUSE, FaultKind.LONG_HOLE):
        return config.service.dead_after_s + float(rng.uniform(*_BEYOND_DEAD_S))
    if kind in (FaultKind.PAUSE, FaultKind.FULL, FaultKind.DELAY, FaultKind.HOLE):
        return float(rng.uniform(*_SHORT_S))
    return 0.0
