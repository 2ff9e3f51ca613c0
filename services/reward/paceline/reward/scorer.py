"""All scorers of a run behind one call: functions in worker processes, remote services, their sum."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Self

from paceline.config.reward import RewardConfig
from paceline.core.errors import ConfigError
from paceline.core.reward_function import RESERVED_NAMES
from paceline.core.scoring import ScoreItem
from paceline.reward.functions.pool import ScorerPool
from paceline.reward.functions.registry import BUILTIN_NAMES
from paceline.reward.remote.client import RemoteOptions, RemoteScorer
from paceline.reward.scoring import FunctionSpec, Verdict, add, check_names
from paceline.service.transport import DEFAULT_MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

_REACH_TIMEOUT_S = 3.0


class Gateway:
    """Scores items by everything that `reward.*` names.

    Args:
        pool: the functions' workers; None where there are no functions.
        remotes: the remote scorers.
        minimum, maximum: the range of the sum.
    """

    def __init__(
        self, *, pool: ScorerPool | None, remotes: Sequence[RemoteScorer], minimum: float, maximum: float
    ) -> None:
        self._pool, self._remotes = pool, tuple(remotes)
        self._minimum, self._maximum = minimum, maximum

    @classmethod
    def of(
        cls, config: RewardConfig, *, token: str = "", max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    ) -> Self:
        """The gateway that a configuration describes; `token` goes to the remote services.

        Raises:
            ConfigError: two scorers share a name.
        """
        specs = function_specs(config)
        check_names([*(spec.name for spec in specs), *(service.name for service in config.services)])
        pool = None
        if specs:
            pool = ScorerPool(
                specs,
                num_workers=config.num_workers,
                timeout_s=config.timeout_s,
                max_retries=config.max_retries,
            )
        remotes = [
            RemoteScorer(
                RemoteOptions(
                    name=service.name,
                    address=service.address,
                    weight=service.weight,
                    timeout_s=config.timeout_s,
                    max_retries=config.max_retries,
                    max_items_per_call=service.max_items_per_call,
                    max_message_bytes=max_message_bytes,
                    token=token,
                )
            )
            for service in config.services
        ]
        return cls(pool=pool, remotes=remotes, minimum=config.min_reward, maximum=config.max_reward)

    async def start(self) -> None:
        """Starts the workers and connects to the remote services, of which one may come up later.

        Raises:
            ConfigError: a function cannot be found, imported or called.
            DeadlineError, PeerLostError: a worker hung or died while importing.
        """
        await asyncio.gather(*(remote.start(timeout_s=_REACH_TIMEOUT_S) for remote in self._remotes))
        if self._pool is not None:
            await self._pool.start()

    async def close(self) -> None:
        """Stops the workers and lets go of the connections."""
        if self._pool is not None:
            await self._pool.close()
        for remote in self._remotes:
            await remote.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Verdict]:
        """One verdict for each item, in the items' order.

        Raises:
            RewardError: UNAVAILABLE, when worker processes cannot be started any more.
        """
        if not items:
            return []
        parts = [remote.score(items, run_id=run_id, step=step) for remote in self._remotes]
        if self._pool is not None:
            parts.append(self._pool.score(items))
        columns = await asyncio.gather(*parts)
        verdicts = [
            add(row, minimum=self._minimum, maximum=self._maximum) for row in zip(*columns, strict=True)
        ]
        errors = Counter(verdict.error for verdict in verdicts if verdict.error is not None)
        for (kind, message), count in errors.most_common(3):
            _log.warning("%d of %d items not scored (%s): %s", count, len(items), kind.value, message)
        return verdicts


def function_specs(config: RewardConfig) -> list[FunctionSpec]:
    """The configured functions with names for their components.

    A built-in's component has its name, a user function's the name after the colon; one that comes again is numbered
    (`gsm8k`, `gsm8k_2`).
    """
    seen: Counter[str] = Counter()
    specs: list[FunctionSpec] = []
    for function in config.functions:
        name = function.name if function.name in BUILTIN_NAMES else function.name.rpartition(":")[2]
        seen[name] += 1
        specs.append(
            FunctionSpec(
                name=name if seen[name] == 1 else f"{name}_{seen[name]}",
                reference=function.name,
                weight=function.weight,
                arguments=dict(function.kwargs),
            )
        )
    return specs


def check_extra_keys(extra_keys: Sequence[str]) -> None:
    """Refuses data columns that would shadow what a reward function is given anyway.

    Raises:
        ConfigError: one of `data.extra_keys` has a reserved name.
    """
    taken = RESERVED_NAMES.intersection(extra_keys)
    if taken:
        raise ConfigError(
            f"data.extra_keys names {', '.join(sorted(taken))}, which a reward function is given already: rename the column"
        )
