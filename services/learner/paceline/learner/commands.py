"""The learner's commands: the work of every rank when rank 0 is asked to train, save, load or push weights.

Arguments travel between ranks, so they are numbers, text and bytes. Rank 0's result is the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from paceline.core.errors import CheckpointError, IllegalTransitionError, InvalidMessageError
from paceline.core.members import EnginePart
from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder, TrainResult
from paceline.engines.memory import EngineMemory
from paceline.learner.batch.blobs import Blobs, ReplayBound, deposit_log_probs, fetch_rows
from paceline.learner.batch.types import PackedRow, ScoredBatch
from paceline.learner.checkpoint.load import roll_back
from paceline.learner.checkpoint.write import CheckpointWriter
from paceline.learner.distributed.collectives import CommandError, attempt, gather_bytes
from paceline.learner.distributed.command_loop import Arguments, Handler
from paceline.learner.distributed.engine_memory import (
    GpuMemory,
    ReleasedMemory,
    release_if_short,
    release_memory,
)
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.learner.model.loading import as_fsdp
from paceline.learner.model.lora import with_adapters
from paceline.learner.model.networks import num_parameters
from paceline.learner.train.profiler import StepProfiler
from paceline.learner.train.scoring import Fetch
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.step import train_step
from paceline.learner.train.work_ahead import work_ahead
from paceline.rpc.v1 import learner_pb2 as pb
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt
from paceline.wire.calls.training import decode_chunk, decode_order

T = TypeVar("T")

TRAIN, AHEAD, SAVE, LOAD, DESCRIBE = "train", "ahead", "save", "load", "describe"
JOIN, PUBLISH, LEAVE, FREE = "join", "publish", "leave", "free"


class Commands:
    """The handlers of one rank."""

    def __init__(
        self, learner: Learner, blobs: Blobs, publisher: WeightPublisher, profiler: StepProfiler
    ) -> None:
        self._learner, self._blobs, self._publisher, self._profiler = learner, blobs, publisher, profiler
        self._writer = CheckpointWriter(learner)
        self._memory = GpuMemory(learner.ranks.device)

    @property
    def table(self) -> dict[str, Handler]:
        """Handlers by command, for a `CommandLoop`."""
        return {
            TRAIN: self._train,
            AHEAD: self._work_ahead,
            SAVE: self._save,
            LOAD: self._load,
            DESCRIBE: self._describe,
            JOIN: self._join,
            PUBLISH: self._publish,
            LEAVE: lambda _: attempt(self._learner.ranks, self._publisher.leave),
            FREE: self._free,
        }

    def finish(self) -> None:
        """Waits for a checkpoint that is being written; called when the loop has ended."""
        self._writer.finish()

    def _train(self, arguments: Arguments) -> TrainResult:
        order, learner = _decoded(decode_order, arguments["order"]), self._learner
        self._require_next(order)
        fetch = self._fetch(dict(enumerate(order.rows)), order.policy)

        def deposit(scored: Sequence[ScoredBatch]) -> None:
            deposit_log_probs(self._blobs, order.rows, scored)

        trainer = learner.config.trainer
        with self._profiler.recording(order.step):
            return train_step(
                learner, order, fetch, deposit if trainer.save_trajectories and trainer.save_tokens else None
            )

    def _work_ahead(self, arguments: Arguments) -> None:
        order = _decoded(decode_chunk, arguments["order"])
        self._require_next(order)
        work_ahead(
            self._learner, order, self._fetch(dict(enumerate(order.rows, order.first_row)), order.policy)
        )

    def _require_next(self, order: TrainOrder | ChunkOrder) -> None:
        version, bound = self._learner.version, self._learner.config.barrier.bound
        if order.step != version + 1 or not 0 <= order.policy.staleness_in(order.step) <= bound:
            raise CommandError(
                IllegalTransitionError(
                    f"the learner holds version {version} and can train step {version + 1} next; asked for "
                    f"step {order.step} on rows of version {order.policy.version}; they may be at most "
                    f"{bound} versions older"
                )
            )

    def _fetch(self, rows: Mapping[int, BatchRow], policy: PolicyTag) -> Fetch:
        """Makes a function that fetches rows by their places in the batch; if one rank fails, all do."""
        learner = self._learner
        newest = learner.version if learner.config.pushes_in_flight else None
        max_age = learner.config.algorithm.replay.max_age
        replay = (
            ReplayBound(learner.version + 1, learner.version - max_age) if learner.config.replays else None
        )

        def fetch(wanted: Sequence[int]) -> dict[int, PackedRow]:
            return attempt(
                learner.ranks,
                lambda: fetch_rows(
                    self._blobs,
                    rows,
                    wanted,
                    policy=policy,
                    vocab_size=learner.vocab_size,
                    images=learner.image_spec,
                    newest=newest,
                    replay=replay,
                    has_teacher=learner.config.algorithm.teacher is not None,
                ),
            )

        return fetch

    def _save(self, arguments: Arguments) -> Future[float]:
        """Begins to write a checkpoint; the future has the seconds that the writing took."""
        return self._writer.save(
            arguments["folder"],
            step=arguments["step"],
            controller_state=arguments["controller_state"],
        )

    def _load(self, arguments: Arguments) -> None:
        learner, version = self._learner, arguments["version"]
        if version != learner.version:
            raise CommandError(
                CheckpointError(
                    f"the learner is at version {learner.version}, asked to load a checkpoint as version "
                    f"{version}"
                )
            )
        roll_back(learner, arguments["folder"])

    def _describe(self, arguments: Arguments) -> pb.DescribeLearnerWeightsResponse:
        """Returns, on rank 0, what the controller needs to form a weight group."""
        ranks = self._learner.ranks
        self._reshard()
        layouts = gather_bytes(self._publisher.layout().to_bytes(), ranks)
        if ranks.world.rank != 0:
            return pb.DescribeLearnerWeightsResponse()
        host, port = self._publisher.open_store()
        return pb.DescribeLearnerWeightsResponse(
            sharding=Sharding.of([RankLayout.from_bytes(data) for data in layouts]).to_bytes(),
            store_host=host,
            store_port=port,
            version=self._learner.version,
        )

    def _join(self, arguments: Arguments) -> None:
        ranks = self._learner.ranks
        spec = attempt(ranks, lambda: WeightGroupSpec.from_bytes(arguments["spec"]))
        attempt(ranks, lambda: self._publisher.join(spec))

    def _publish(self, arguments: Arguments) -> PushReceipt:
        learner, version = self._learner, arguments["version"]
        if version != learner.version:
            raise CommandError(
                IllegalTransitionError(
                    f"the learner holds version {learner.version}, asked to publish {version}"
                )
            )
        timeout_s = learner.config.weights.push_timeout_s
        self._reshard()
        with with_adapters(learner.actor.network):
            receipt = attempt(learner.ranks, lambda: self._publisher.publish(version, timeout_s=timeout_s))
        if learner.config.rollout.sleep != "always":
            # If engines sleep, the controller orders this when they wake.
            release_if_short(self._memory)
        # Rank 0 needs its own report itself, so this large report is not gathered.
        numbers = gather_bytes(dataclasses.replace(receipt, reports=()).to_bytes(), learner.ranks)
        merged = PushReceipt.merge([PushReceipt.from_bytes(data) for data in numbers])
        return dataclasses.replace(merged, reports=receipt.reports)

    def _reshard(self) -> None:
        """Frees gathered parameters: the publisher reads the language model inside the sharded network."""
        as_fsdp(self._learner.actor.network).reshard()

    def _free(self, arguments: Arguments) -> ReleasedMemory:
        """Frees memory for parts of an engine on this rank's GPU."""
        self._reshard()
        learner, measured = self._learner, arguments["engine_bytes"]
        engine = EngineMemory.of_numbers(learner.config, num_parameters(learner.actor.network))

        def needed(parts: Collection[EnginePart]) -> int:
            return engine.woken(parts, learner.config, self._memory.total, measured)

        parts = [EnginePart(word) for word in arguments["parts"]]
        return release_memory(parts, needed, self._memory, learner.ranks)


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """Decodes an order; every rank has the same bytes, so all ranks refuse the same orders."""
    try:
        return decode(data)
    except InvalidMessageError as error:
        raise CommandError(error) from error
