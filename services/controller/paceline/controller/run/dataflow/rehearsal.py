"""Tries a dataflow before the run: one step, twice, on made-up samples.

Errors that would end the run in its first step are reported before anything is loaded, and so is a dataflow
whose second execution differs. Journal, batches and guard are real, in a temporary folder; services are
stand-ins. The rewards of a prompt's samples are 0, 1, 2, and so on.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Verdict
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Ask, Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.replay import ReplayBuffer
from paceline.controller.batch.training_batch import TrainingBatches
from paceline.controller.events import EventHub
from paceline.controller.guard.report import Guard
from paceline.controller.journal import Journal
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.controller.run.dataflow.dataflow import Dataflow, carry_out
from paceline.controller.run.dataflow.verbs import Verbs
from paceline.controller.run.lookahead import Lookahead
from paceline.controller.run.parts import RunParts
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import FinishReason, ScoredHeader
from paceline.core.training import TrainOrder, TrainResult

_POLICY = PolicyTag(version=0, digest="0" * 16)
_MADE_UP_S = 60.0
_PUSHED = {"weights/pause_ms": 0.0, "perf/num_gpus": 0.0}


async def rehearse(flow: Dataflow, config: RunConfig, inputs: Inputs) -> str:
    """Runs step 1 twice; returns a description of the step.

    Raises:
        PacelineError: the dataflow breaks a rule, raises an error, or does something else the second time.
    """
    config, cursor = config.changed(trainer={"save_trajectories": False}), inputs.cursor.state
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "events.jsonl", SystemClock())
        run = Run(config=config, id="rehearsal", dir=Path(folder), journal=journal, events=EventHub())
        try:
            services = [_StandIns(config), _StandIns(config)]
            for stand_ins in services:
                inputs.cursor.restore(cursor)
                await carry_out(flow, _verbs(run, inputs, stand_ins))
        finally:
            inputs.cursor.restore(cursor)
            journal.close()
    first, second = services
    if first.digests != second.digests:
        raise ConfigError(
            f"trainer.dataflow={config.trainer.dataflow} trained something else when the same step was "
            "carried out again on the same samples: what it does in a step must follow from its samples "
            "alone, without clocks and random numbers (docs/python.md)"
        )
    sampled = ", then ".join(first.sampled)
    return f"{config.trainer.dataflow}, which sampled {sampled} and trained {first.num_rows} of them"


def _verbs(run: Run, inputs: Inputs, services: _StandIns) -> Verbs:
    progress, stand_ins = Progress(run, step=1), cast(Any, services)
    progress.phase = Phase.FORMING
    batches = TrainingBatches(run, inputs)
    lookahead = Lookahead(
        run, progress, inputs=inputs, batches=batches, collector=stand_ins, publication=stand_ins
    )
    parts = RunParts(
        run=run,
        progress=progress,
        inputs=inputs,
        batches=batches,
        collector=stand_ins,
        learner=stand_ins,
        publication=stand_ins,
        checkpoints=stand_ins,
        guard=Guard(run),
        turns=stand_ins,
        ahead=stand_ins,
        lookahead=lookahead,
        replay=ReplayBuffer(run),
        validation=stand_ins,
        write_metrics=lambda metrics: None,
    )
    return Verbs(
        parts,
        cast(Any, SimpleNamespace(version=0, resumed=None, learner=None)),
        number=1,
        policy=_POLICY,
        committed=_POLICY,
        began=time.monotonic(),
        cleanup_s=0.0,
        patience=run.config.collect_timeout_s,
    )


class _StandIns:
    """Stands in for the collector, learner, publication, turns and work ahead that the verbs call.

    Attributes:
        sampled: descriptions of the samples that were requested.
        digests: digests of the batches that were trained.
    """

    def __init__(self, config: RunConfig) -> None:
        self._names = list(config.reward.named_scorers)
        self.mailboxes = self
        self.sampled: list[str] = []
        self.digests: list[str] = []
        self.num_rows = 0

    # --- the collector

    async def dispatch(self, order: Order) -> None:
        counts = [f"{ask.num_samples * len(order.prompts)} for {ask.purpose}" for ask in order.asks]
        self.sampled.append(" and ".join(counts))

    async def collect(self, order: Order, refill: object = None, **options: object) -> Batch:
        samples, *others = [self._headers(order, ask) for ask in order.asks]
        beside = {str(ask.purpose): headers for ask, headers in zip(order.asks[1:], others, strict=True)}
        return Batch(
            samples=samples,
            dropped=(),
            verdicts=Counter[Verdict](),
            num_groups=len(order.prompts),
            beside=beside,
        )

    async def texts(self, headers: Sequence[ScoredHeader], *, required: bool = False) -> list[str]:
        return [f"Made-up answer {header.trajectory_id}." for header in headers]

    def _headers(self, order: Order, ask: Ask) -> list[ScoredHeader]:
        return [
            self._header(order, ask, prompt_id, index)
            for prompt_id in order.prompts
            for index in range(ask.num_samples)
        ]

    def _header(self, order: Order, ask: Ask, prompt_id: int, index: int) -> ScoredHeader:
        key = TrajectoryId(step=order.step, purpose=str(ask.purpose), prompt_id=prompt_id, sample_index=index)
        return ScoredHeader(
            run_id="rehearsal",
            trajectory_id=key,
            policy=order.policy,
            blob_key=str(key),
            blob_digest="0" * 32,
            num_prompt_tokens=len(order.prompts[prompt_id].token_ids),
            num_response_tokens=4,
            num_sampled_tokens=4,
            finish_reason=FinishReason.STOP,
            server_id="nobody",
            generation_s=0.0,
            reward=float(index),
            components=dict.fromkeys(self._names, float(index)),
            reward_error=None,
            scorer="nobody",
            reward_s=0.0,
        )

    # --- publication, work ahead, turns, learner

    async def to_newcomers(self, policy: PolicyTag, collection: Any) -> Batch:
        async with asyncio.timeout(_MADE_UP_S):
            batch: Batch = await collection
        return batch

    async def publish(self, version: int) -> Mapping[str, float]:
        """Returns the metrics of a push, but pushes nothing."""
        return _PUSHED

    async def make_way(self, version: int) -> None:
        """Returns at once, since no validation is under way."""

    @contextlib.asynccontextmanager
    async def during(self, order: Order, adjustments: object) -> AsyncIterator[None]:
        """Does no work ahead of the barrier."""
        yield None

    async def take(self, turn: object) -> None:
        """Returns at once, since no GPU is shared."""

    def take_metrics(self) -> dict[str, float]:
        """Returns no metrics, since nothing was measured."""
        return {}

    async def train(self, member: object, order: TrainOrder) -> TrainResult:
        self.digests.append(order.digest)
        self.num_rows = len(order.rows)
        return TrainResult(step=order.step, metrics={})
