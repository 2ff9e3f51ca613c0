"""Members of a run without a model, for benchmarks/load.py: only engine and learner are simulated.

python benchmarks/load_members.py rollout --controller HOST:PORT --first 0 --count 5
python benchmarks/load_members.py learner --controller HOST:PORT

A process holds any number of rollout servers, each with the service's app, sampler and mailboxes; the engine
draws random words at once and pretends to receive weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.broker.redis.redis_blobs import BlobClient
from paceline.config.run import RunConfig
from paceline.core.members import EnginePart, LearnerState, MemberKind
from paceline.core.policy import PolicyTag
from paceline.core.run_record.manifest import manifest_text
from paceline.core.samples.trajectory import FinishReason
from paceline.core.training import TrainOrder, TrainResult
from paceline.rollout import app as rollout_app
from paceline.rollout.engines.base import Engine, Sample, SampleRequest, do_nothing
from paceline.rpc.v1 import learner_pb2, learner_pb2_grpc
from paceline.service.member import controller_link
from paceline.service.member.bootstrap import MemberOptions, MemberSession
from paceline.service.member.controller_link import MemberReport
from paceline.service.member.runtime import ServiceContext, run_service
from paceline.service.observability import telemetry
from paceline.service.observability.usage import UsageSampler
from paceline.weights.digest.agreement import DigestReport, SliceDigest, format_digest, model_digest
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt
from paceline.wire import blob_digest, decode_trajectory
from paceline.wire.calls.training import order_from_proto, result_to_proto

SHAPE = (2,)


def layout() -> RankLayout:
    """Returns a rank's layout with a single tensor."""
    part = TensorSlice(name="w", global_shape=SHAPE, box=Box.full(SHAPE), param="w", offset=(0,))
    return RankLayout(dtype="float32", slices=(part,))


def receipt(rank: str, version: int) -> PushReceipt:
    """Returns the receipt of an instant push; every weight equals the version."""
    part = SliceDigest(name="w", global_shape=SHAPE, box=Box.full(SHAPE), value=version + 1)
    return PushReceipt(
        version=version,
        reports=(DigestReport.of(rank=rank, version=version, slices=(part,)),),
        num_bytes=8,
        relayed_bytes=0,
        transfer_ms=0.0,
        digest_ms=0.0,
        peak_extra_bytes=0,
    )


class PaperEngine(Engine):
    """Draws random words, all at once.

    Args:
        vocab_size: rows of the model's embedding.
        words: ids of the tokens to draw.
    """

    def __init__(self, vocab_size: int, words: Sequence[int]) -> None:
        self._vocab_size, self._words = vocab_size, np.array(words, dtype=np.int32)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return self._vocab_size

    @property
    def kv_cache_tokens(self) -> int:
        """Returns 0: there is no KV cache."""
        return 0

    async def describe(self) -> tuple[RankLayout, ...]:
        """Returns one rank."""
        return (layout(),)

    async def join(self, spec: WeightGroupSpec, rank_offset: int, timeout_s: float) -> None:
        """Nothing to connect."""

    async def receive(self, version: int, timeout_s: float) -> PushReceipt:
        """Returns a receipt at once."""
        return receipt("rollout", version)

    async def digest(self, version: int) -> tuple[DigestReport, ...]:
        """Returns the digests that the push reported."""
        return receipt("rollout", version).reports

    async def leave(self) -> None:
        """Nothing to leave."""

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Returns full-length responses drawn from the seeds."""
        await asyncio.sleep(0)
        samples = []
        for request in requests:
            draw = np.random.default_rng(request.seed)
            count = request.sampling.max_tokens
            token_ids = self._words[draw.integers(0, len(self._words), count, dtype=np.int32)]
            samples.append(
                Sample(
                    token_ids=token_ids,
                    log_probs=np.full(count, -1.0, np.float32),
                    finish_reason=FinishReason.LENGTH,
                )
            )
            ended()
        return samples

    async def sleep(self) -> int:
        """Frees nothing."""
        return 0

    async def wake(self, part: EnginePart) -> None:
        """Allocates nothing."""

    async def check_health(self) -> None:
        """Passes always."""

    async def shutdown(self) -> None:
        """Ends nothing."""


class PaperLearner(learner_pb2_grpc.LearnerServiceServicer):
    """Answers every call at once; fetches its trajectories, and trains nothing.

    Attributes:
        blobs: where the trajectories are.
    """

    def __init__(self) -> None:
        self.policy = PolicyTag(version=0, digest="")
        self.blobs: BlobClient

    async def DescribeWeights(self, request: Any, context: Any) -> Any:
        """One rank."""
        return learner_pb2.DescribeLearnerWeightsResponse(
            sharding=Sharding.of([layout()]).to_bytes(),
            store_host="127.0.0.1",
            store_port=1,
            version=self.policy.version,
        )

    async def JoinWeightGroup(self, request: Any, context: Any) -> Any:
        """Nothing to connect."""
        return learner_pb2.JoinLearnerGroupResponse()

    async def PublishWeights(self, request: Any, context: Any) -> Any:
        """Done at once."""
        pushed = receipt("learner", request.version)
        self.policy = PolicyTag(version=request.version, digest=format_digest(model_digest(pushed.reports)))
        return learner_pb2.PublishWeightsResponse(receipt=pushed.to_bytes())

    async def LeaveWeightGroup(self, request: Any, context: Any) -> Any:
        """Nothing to leave."""
        return learner_pb2.LeaveLearnerGroupResponse()

    async def AbandonPush(self, request: Any, context: Any) -> Any:
        """Releases nobody."""
        return learner_pb2.AbandonPushResponse()

    async def TrainStep(self, request: Any, context: Any) -> Any:
        """Reads the `TrainOrder` and its trajectories, as the real learner does, and answers."""
        order = order_from_proto(request)
        await asyncio.to_thread(self._fetch, order)
        await asyncio.sleep(float(os.environ.get("PACELINE_PAPER_TRAIN_S", "0")))
        self.policy = PolicyTag(version=order.step, digest="")
        return result_to_proto(TrainResult(step=order.step, metrics={"actor/ppo_kl": 0.0}))

    def _fetch(self, order: TrainOrder) -> None:
        for start in range(0, len(order.rows), 64):
            rows = order.rows[start : start + 64]
            for row, blob in zip(rows, self.blobs.get([row.blob_key for row in rows]), strict=True):
                assert blob_digest(blob, like=row.blob_digest) == row.blob_digest
                decode_trajectory(blob)

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        """Writes only a manifest."""
        await asyncio.to_thread(_write_manifest, Path(request.folder), request)
        return learner_pb2.SaveCheckpointResponse(seconds=0.0)

    async def WaitCheckpoint(self, request: Any, context: Any) -> Any:
        """Answers at once."""
        return learner_pb2.WaitCheckpointResponse(seconds=0.0)

    def report(self) -> MemberReport:
        """Reports ready."""
        return MemberReport(state=LearnerState.READY, policy=self.policy)


def _write_manifest(folder: Path, request: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads(request.controller_state)
    (folder / "manifest.json").write_text(
        manifest_text({"step": request.step, "controller_state": state, "files": {}})
    )


async def serve_rollouts(context: ServiceContext, controller: str, first: int, count: int) -> None:
    """Runs rollout servers until the run is over."""
    # Spans per group and server would dominate the measurement.
    telemetry.setup = lambda *_, **__: None  # type: ignore[assignment]
    rollout_app.start_engine = start_engine
    # All servers share one sampler, because a sample reads every process of the machine.
    usage = UsageSampler(uses_gpus=False)
    controller_link.UsageSampler = lambda **_: usage  # type: ignore[assignment, misc]
    async with asyncio.TaskGroup() as tasks:
        for number in range(first, first + count):
            options = MemberOptions(
                controller=controller, member_id=f"rollout-{number}", host="127.0.0.1", port=0
            )
            session = MemberSession(context, options, kind=MemberKind.ROLLOUT)
            tasks.create_task(rollout_app.RolloutApp(session).run())


async def start_engine(config: RunConfig) -> Engine:
    """Makes a server's engine, which draws the tokens of several letters: text, as a model writes it."""
    folder = Path(config.model.path)
    model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = [number for text, number in tokens.items() if len(text) > 1 and text.isalpha()]
    return PaperEngine(int(model["vocab_size"]), words)


async def serve_learner(context: ServiceContext, controller: str) -> None:
    """Runs the learner until the run is over."""
    learner = PaperLearner()
    options = MemberOptions(controller=controller, member_id="learner-0", host="127.0.0.1", port=0)
    session = MemberSession(context, options, kind=MemberKind.LEARNER)
    registration = await session.join(
        learner_pb2_grpc.add_LearnerServiceServicer_to_server, learner, learner.report
    )
    learner.blobs = BlobClient(registration.broker_url, stores=registration.blob_stores)
    await context.stopping.wait()


def main() -> int:
    """Serves the members; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("rollout", "learner"))
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    parser.add_argument("--first", type=int, default=0, help="number of the first rollout server")
    parser.add_argument("--count", type=int, default=1, help="rollout servers in this process")
    args = parser.parse_args()
    if args.kind == "learner":
        return run_service(lambda context: serve_learner(context, args.controller), name="learner")
    return run_service(
        lambda context: serve_rollouts(context, args.controller, args.first, args.count), name="rollout"
    )


if __name__ == "__main__":
    sys.exit(main())
