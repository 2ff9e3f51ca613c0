"""A fleet without processes: fake services that record calls, and a task that answers prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from paceline.broker import names
from paceline.broker.base import Broker, Entry, Outgoing
from paceline.broker.mailbox import Mailbox
from paceline.controller.fleet.clients import FreedMemory, LearnerWeights
from paceline.controller.fleet.membership import Member
from paceline.controller.verify.digests import digest_of
from paceline.core.errors import (
    CheckpointError,
    IllegalTransitionError,
    LostDataError,
    PeerLostError,
    VersionMismatchError,
)
from paceline.core.guard import Adjustments, Reading
from paceline.core.ids import Purpose
from paceline.core.members import EnginePart
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.run_record.manifest import MANIFEST, manifest_text
from paceline.core.samples.trajectory import FinishReason, GroupRefusal, PromptGroup, ScoredHeader, Trajectory
from paceline.core.training import TrainOrder, TrainResult
from paceline.rollout import states
from paceline.rollout.states import RolloutStatus
from paceline.weights.digest.agreement import DigestReport, SliceDigest
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, RankPlace, TensorSlice
from paceline.weights.geometry.sharding import Sharding
from paceline.weights.receipt import PushReceipt
from paceline.wire import (
    blob_digest,
    decode_prompt_group,
    encode_group_refusal,
    encode_scored_header,
    encode_trajectory,
)


def layout(gpu: str = "") -> RankLayout:
    """One rank that holds the one tensor there is."""
    tensor = TensorSlice(name="w", global_shape=(2,), box=Box.full((2,)), param="w", offset=(0,))
    return RankLayout(dtype="float32", slices=(tensor,), place=RankPlace(gpu=gpu))


def report(rank: str, version: int, value: int) -> DigestReport:
    """What a rank says after a push."""
    part = SliceDigest(name="w", global_shape=(2,), box=Box.full((2,)), value=value)
    return DigestReport.of(rank=rank, version=version, slices=(part,))


class FakeServices:
    """The learner and the rollout servers, behind the interfaces of their clients; records all calls.

    Attributes:
        lose: members whose receive fails.
        sleepless: members that fail to sleep.
        has_room: whether a whole engine fits beside what the learner caches.
        freed_bytes: what a server says that it gave up.
        engine_bytes: what the learner was told that an engine takes, by order to free memory.
        corrupt: members that report a wrong digest.
        readings: the guard's, by step.
        writes: whether a checkpoint leaves its manifest.
        gpus: ids of the GPUs that members are on.
        version: the one that the learner holds.
        source: the step whose weights the learner holds.
        trained: the digest of the batch of each step that was trained, in order.
        standings: the state of each server, with its weights; one that is not in it is a new process.
        sources: the step whose weights each checkpoint has, by its step.
        restarted: called with the reason when the learner is told to start again.
        has_blob: whether the broker has the blob with this key.
        may_end: whether a group that is begun may end, or waits for new weights; None without
            `rollout.in_flight`.
        validators: the validation servers.
        stores: names of the blob stores, which share the prompts; empty: there are none.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lose: set[str] = set()
        self.sleepless: set[str] = set()
        self.has_room = False
        self.freed_bytes: dict[str, int] = {}
        self.engine_bytes: list[int] = []
        self.corrupt: set[str] = set()
        self.orders: list[TrainOrder] = []
        self.saved: list[bytes] = []
        self.readings: dict[int, list[Reading]] = {}
        self.writes = False
        self.gpus: dict[str, str] = {}
        self.version = 0
        self.source = 0
        self.trained: list[tuple[int, str]] = []
        self.standings: dict[str, RolloutStatus] = {}
        self.sources: dict[int, int] = {}
        self.restarted: Callable[[str], None] = lambda reason: None
        self.has_blob: Callable[[str], bool] = lambda key: True
        self.may_end: Callable[[PromptGroup], bool] | None = None
        self.validators: set[str] = set()
        self.stores: tuple[str, ...] = ()
        self.learner, self.rollout = FakeLearner(self), FakeRollout(self)

    @property
    def policies(self) -> dict[str, PolicyTag]:
        """What each server samples from."""
        return {name: s.policy for name, s in self.standings.items() if s.policy is not None}

    def standing(self, member_id: str) -> RolloutStatus:
        """A server's; that of a new process whose engine is up, where there is none."""
        return self.standings.get(member_id) or states.advance(RolloutStatus(), states.EngineReady())

    def move(self, member: Member, event: states.Event) -> None:
        """Moves a server as the real one does, and tells the controller of it."""
        after = self.standings[member.member_id] = states.advance(self.standing(member.member_id), event)
        member.state, member.policy = after.state, after.policy

    @property
    def batches(self) -> list[list[tuple[int, int]]]:
        """(prompt id, sample index) of every row, batch after batch."""
        ids = [[row.trajectory_id for row in order.rows] for order in self.orders]
        return [[(name.prompt_id, name.sample_index) for name in batch] for batch in ids]

    @property
    def adjustments(self) -> list[Adjustments]:
        """What the guard had changed, step after step."""
        return [order.adjustments for order in self.orders]


class FakeLearner:
    """Stands for `LearnerClient`."""

    def __init__(self, services: FakeServices) -> None:
        self.services = services
        self.epoch: int | None = None

    async def describe(self, member: Member) -> LearnerWeights:
        self.services.calls.append(f"describe {member.member_id}")
        # Like the learner: whoever asks has dissolved its group, or is another controller.
        self.epoch = None
        return LearnerWeights(
            layouts=Sharding.of([layout(self.services.gpus.get(member.member_id, ""))]),
            store_host="127.0.0.1",
            store_port=1,
            version=self.services.version,
        )

    async def join(self, member: Member, *, epoch: int, spec: bytes) -> None:
        self.services.calls.append(f"join {member.member_id} e{epoch}")
        self.epoch = epoch

    async def publish(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        self.services.calls.append(f"publish v{version} e{epoch}")
        if version != self.services.version:
            raise IllegalTransitionError(
                f"the learner holds version {self.services.version}, asked to publish {version}"
            )
        if epoch != self.epoch:
            raise VersionMismatchError(f"the learner is in weight group {self.epoch}, not in {epoch}")
        return PushReceipt(
            version=version,
            reports=(report("learner", version, 7 + self.services.source),),
            num_bytes=8,
            relayed_bytes=0,
            transfer_ms=1,
            digest_ms=1,
            peak_extra_bytes=16,
        )

    async def abandon(self, member: Member, *, epoch: int, lost: str) -> None:
        self.services.calls.append(f"abandon e{epoch} for {lost}")

    async def leave(self, member: Member, *, epoch: int) -> None:
        self.services.calls.append(f"leave {member.member_id} e{epoch}")

    async def free(self, member: Member, parts: Sequence[EnginePart], engine_bytes: int) -> FreedMemory:
        self.services.engine_bytes.append(engine_bytes)
        self.services.calls.append(" ".join(["free", *(part.value for part in parts)]))
        is_enough = not parts or self.services.has_room
        return FreedMemory(
            freed_bytes=0 if parts and self.services.has_room else 1 << 30, is_enough=is_enough
        )

    async def train(self, member: Member, order: TrainOrder) -> TrainResult:
        key = (order.step, order.digest)
        if self.services.trained[-1:] == [key]:
            self.services.calls.append(f"train {order.step} again")
        elif order.step != self.services.version + 1:
            raise IllegalTransitionError(
                f"the learner holds version {self.services.version}, asked for step {order.step}"
            )
        elif not all(self.services.has_blob(row.blob_key) for row in order.rows):
            raise LostDataError(f"blobs of step {order.step} are gone")
        else:
            self.services.calls.append(f"train {order.step}")
            self.services.orders.append(order)
            self.services.trained.append(key)
            self.services.version = self.services.source = order.step
        readings = tuple(self.services.readings.get(order.step, ()))
        metrics = {"actor/ppo_kl": 0.0, "critic/score/mean": fmean(row.reward for row in order.rows)}
        return TrainResult(step=order.step, metrics=metrics, readings=readings)

    async def save(self, member: Member, *, step: int, folder: str, controller_state: bytes) -> float:
        self.services.calls.append(f"save {step}")
        self._require_version(step)
        self.services.saved.append(controller_state)
        self.services.sources[step] = self.services.source
        if self.services.writes:
            _write_checkpoint(Path(folder), controller_state, f"weights {self.services.source}")
        return 0.0

    async def wait_checkpoint(self, member: Member, *, step: int) -> float:
        return 0.0

    async def load(self, member: Member, *, folder: str, version: int) -> float:
        self.services.calls.append(f"load {Path(folder).name} as {version}")
        self._require_version(version)
        step = int(Path(folder).name.rpartition("_")[2])
        self.services.source = self.services.sources.get(step, step)
        return 0.0

    def _require_version(self, version: int) -> None:
        if version != self.services.version:
            raise CheckpointError(
                f"the learner is at version {self.services.version}, not at that of the checkpoint, {version}"
            )

    async def restart(self, member: Member, *, reason: str) -> None:
        self.services.calls.append("restart")
        self.services.restarted(reason)


class FakeRollout:
    """Stands for `RolloutClient`, with the states of the real servers."""

    def __init__(self, services: FakeServices) -> None:
        self.services = services
        self._epochs: dict[str, int] = {}

    async def describe(self, member: Member) -> tuple[RankLayout, ...]:
        self.services.calls.append(f"describe {member.member_id}")
        self._epochs.pop(member.member_id, None)
        return (layout(self.services.gpus.get(member.member_id, "")),)

    async def join(self, member: Member, *, epoch: int, spec: bytes, rank_offset: int) -> None:
        self.services.calls.append(f"join {member.member_id} e{epoch} at {rank_offset}")
        if EnginePart.WEIGHTS in self.services.standing(member.member_id).asleep:
            raise IllegalTransitionError("a server that is asleep joins no weight group; wake it first")
        self._epochs[member.member_id] = epoch

    async def receive(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        self.services.calls.append(f"receive {member.member_id} v{version} e{epoch}")
        if epoch != (current := self._epochs.get(member.member_id)):
            raise VersionMismatchError(f"this server is in weight group {current}, not in {epoch}")
        self.services.move(member, states.ReceiveBegan())
        if member.member_id in self.services.lose:
            del self._epochs[member.member_id]
            self.services.move(member, states.ReceiveFailed())
            raise PeerLostError(f"{member.member_id} went away", peer=member.member_id)
        self.services.move(member, states.ReceiveEnded(version))
        value = 1 if member.member_id in self.services.corrupt else 7 + self.services.source
        return PushReceipt(
            version=version,
            reports=(report(member.member_id, version, value),),
            num_bytes=8,
            relayed_bytes=4,
            transfer_ms=1,
            digest_ms=1,
            peak_extra_bytes=32,
        )

    async def sleep(self, member: Member) -> int:
        self.services.calls.append(f"sleep {member.member_id}")
        if member.member_id in self.services.sleepless:
            raise PeerLostError(f"{member.member_id} went away", peer=member.member_id)
        self.services.move(member, states.Slept())
        return self.services.freed_bytes.get(member.member_id, 0)

    async def wake(self, member: Member, part: EnginePart) -> None:
        self.services.calls.append(f"wake {member.member_id} {part.value}")
        self.services.move(member, states.Woken(part))

    async def commit(self, member: Member, policy: PolicyTag) -> None:
        self.services.calls.append(f"commit {member.member_id} {policy.version}")
        self.services.move(member, states.Committed(policy))

    async def leave(self, member: Member, *, epoch: int) -> None:
        self.services.calls.append(f"leave {member.member_id} e{epoch}")


def _write_checkpoint(folder: Path, controller_state: bytes, weights: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads(controller_state)
    (folder / "__0_0.distcp").write_text(weights)
    files = {"__0_0.distcp": {"size": len(weights), "blake2b": digest_of(weights.encode())}}
    (folder / MANIFEST).write_text(
        manifest_text({"step": state["step"], "controller_state": state, "files": files})
    )


_DRAWS = itertools.count()

Answer = Callable[[PromptGroup, int], dict[str, Any] | GroupRefusal]


def score_all(group: PromptGroup, sample_index: int) -> dict[str, Any]:
    """The reward of every sample is its index."""
    return {"reward": float(sample_index), "reward_error": None}


def score_by_component(group: PromptGroup, sample_index: int) -> dict[str, Any]:
    """The same, as the only scorer's."""
    reward = float(sample_index)
    return {"reward": reward, "reward_error": None, "components": {"exact_match": reward}}


async def answer_prompts(
    broker: Broker,
    run_id: str,
    services: FakeServices,
    answer: Answer = score_all,
    may_answer: Callable[[], bool] = lambda: True,
) -> None:
    """Answers the prompts of the newest version that a server samples from with scored headers."""
    if services.may_end is not None:
        await answer_in_flight(broker, run_id, services, services.may_end, answer, may_answer)
    while True:
        serving = {n: p.version for n, p in services.policies.items() if n not in services.validators}
        version = max(serving.values(), default=None)
        if version is None or not may_answer():
            await asyncio.sleep(0.005)
            continue
        async with Mailbox(
            broker, names.prompts(run_id, version), names.ROLLOUT_GROUP, "fake", block_s=0.02
        ) as box:
            entries = await box.take()
            if entries and not may_answer():
                await box.give_back(entries)
                continue
            for entry in entries:
                group = decode_prompt_group(entry.payload)
                beside, stores = bool(services.validators), services.stores
                samples = reversed(range(group.num_samples))
                await broker.append(
                    [_message(run_id, group, i, answer, beside=beside, stores=stores) for i in samples]
                )
            await box.done(entries)


async def answer_validations(
    broker: Broker, run_id: str, services: FakeServices, answer: Answer, may_answer: Callable[[int], bool]
) -> None:
    """Answers, as validation servers, prompts for those of their versions that they may answer."""
    while True:
        await asyncio.sleep(0.002)
        policies = {name: services.policies.get(name) for name in services.validators}
        for name, policy in policies.items():
            if policy is None or not may_answer(policy.version):
                continue
            stream = names.val_prompts(run_id, policy.version)
            async with Mailbox(broker, stream, names.ROLLOUT_GROUP, name, block_s=0.0) as box:
                entries = await box.take()
                for group in (decode_prompt_group(entry.payload) for entry in entries):
                    assert group.policy == policy
                    samples = reversed(range(group.num_samples))
                    await broker.append(
                        [_message(run_id, group, i, answer, beside=True, server=name) for i in samples]
                    )
                await box.done(entries)


async def answer_in_flight(
    broker: Broker,
    run_id: str,
    services: FakeServices,
    may_end: Callable[[PromptGroup], bool],
    answer: Answer,
    may_answer: Callable[[], bool],
) -> None:
    """Answers prompts for any version: a sample's second token is of the weights at its end."""
    begun: list[tuple[Entry, PolicyTag]] = []
    async with Mailbox(broker, names.prompts(run_id, None), names.ROLLOUT_GROUP, "fake", block_s=0.0) as box:
        while True:
            await asyncio.sleep(0.002)
            policy = max(services.policies.values(), key=lambda tag: tag.version, default=None)
            if policy is None or not may_answer():
                continue
            # A server that ended has left its groups to one that begins them anew, say with older weights.
            begun = [(entry, first if first.version <= policy.version else policy) for entry, first in begun]
            begun += [(entry, policy) for entry in await box.take()]
            for entry, first in list(begun):
                group = decode_prompt_group(entry.payload)
                if group.policy.version > policy.version or (first == policy and not may_end(group)):
                    continue
                begun.remove((entry, first))
                policies = (first, policy) if first != policy else (policy,)
                samples = reversed(range(group.num_samples))
                await broker.append([_message(run_id, group, i, answer, policies) for i in samples])
                await box.done([entry])


def _drawn(run_id: str, group: PromptGroup, index: int, policies: Sequence[PolicyTag]) -> Trajectory:
    """Two tokens that follow from the seed, as an engine's do."""
    return Trajectory(
        run_id=run_id,
        trajectory_id=group.trajectory_id(index),
        policy=policies[0],
        ranges=_ranges(policies),
        prompt_token_ids=group.prompt_token_ids,
        response_token_ids=np.array([group.seeds[index] % 97, 0], dtype=np.int32),
        response_log_probs=np.array([-0.5, -0.25], dtype=np.float32),
        response_mask=np.ones(2, dtype=np.uint8),
        finish_reason=FinishReason.STOP,
        sampling=group.sampling,
        seed=group.seeds[index],
    )


def _ranges(policies: Sequence[PolicyTag]) -> tuple[PolicyRange, ...]:
    """One token each, where there are two."""
    return tuple(PolicyRange(tag, i, i + 1) for i, tag in enumerate(policies)) if len(policies) > 1 else ()


def _message(
    run_id: str,
    group: PromptGroup,
    index: int,
    answer: Answer,
    policies: Sequence[PolicyTag] = (),
    *,
    beside: bool = False,
    server: str = "fake",
    stores: Sequence[str] = (),
) -> Outgoing:
    policies = policies or (group.policy,)
    stream, answered = names.scored(run_id), answer(group, index)
    if beside and group.purpose == Purpose.VALIDATE:
        stream = names.val_scored(run_id, group.policy.version)
    if isinstance(answered, GroupRefusal):
        return Outgoing(stream=stream, payload=encode_group_refusal(answered))
    draw, store = ("0", "") if not stores else (str(next(_DRAWS)), stores[group.prompt_id % len(stores)])
    key = names.blob(run_id, str(group.trajectory_id(index)), "fake", draw, store)
    blob = encode_trajectory(_drawn(run_id, group, index, policies))
    header = ScoredHeader(
        run_id=run_id,
        trajectory_id=group.trajectory_id(index),
        policy=policies[0],
        ranges=_ranges(policies),
        blob_key=key,
        blob_digest=blob_digest(blob),
        num_prompt_tokens=len(np.asarray(group.prompt_token_ids)),
        num_response_tokens=2,
        finish_reason=FinishReason.STOP,
        server_id=server,
        generation_s=0.0,
        scorer="fake",
        reward_s=0.0,
        text_key=names.text(key),
        **{"components": {}, "num_sampled_tokens": 2, **answered},
    )
    blobs = {key: blob, names.text(key): f"sample {index} of {group.prompt_id}".encode()}
    return Outgoing(stream=stream, payload=encode_scored_header(header), blobs=blobs)
