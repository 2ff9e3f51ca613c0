"""Complete pushes over gloo between threads, into models that look like vLLM's, and every way to fail."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import SOME_MEMBER, MemberKind, RankRef
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.rollout.engines.rank_receiver import RankReceiver
from paceline.rollout.engines.weights.layout import describe_model
from paceline.weights.digest.agreement import disagreement, model_digest
from paceline.weights.digest.job import TensorDigester
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, RankPlace
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt
from paceline.weights.transport.connecting import Connecting
from paceline.weights.transport.group import WeightGroup
from paceline.weights.transport.place import place_of
from paceline.weights.transport.rendezvous import Abandonment, Deadline, abandon, open_store
from paceline.weights.transport.shared_group import SharedGroup, group_kind
from support.fake_gpt_oss import EXPERTS, ROUTER, LearnersTensors, fake_gpt_oss
from support.fake_vllm import add_parameter, fake_qwen2
from support.reference_digest import digest_array
from support.weight_layouts import DenseModel, fsdp_layout, tp_layout

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
# What has to end without waiting for the group's deadline ends long before it, however slow the machine is.
LONG_S = 500.0
AT_ONCE_S = 150.0


def dense(**changes: object) -> DenseModel:
    sizes = {
        "vocab_size": 199,
        "hidden": 16,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 4,
        "intermediate": 24,
        "layers": 2,
        "tied": False,
        "bias": True,
    }
    return DenseModel(**{**sizes, **changes})


class FlatModel(nn.Module):
    """Holds every tensor of a checkpoint in full, under its state-dict name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            add_parameter(self, name, torch.randn(shape, generator=generator))


class Fleet:
    """One unsharded learner and some rollout ranks, each in its own thread."""

    def __init__(
        self,
        model: DenseModel | LearnersTensors,
        size: int,
        *,
        engines: int = 1,
        load: Any = None,
        build: Callable[..., nn.Module] = fake_qwen2,
        **options: Any,
    ) -> None:
        self.source = FlatModel(model.shapes(), seed=0)
        self.publisher = WeightPublisher(self.source, CPU)
        self.size = size
        make = partial(build, model) if isinstance(model, DenseModel) else build
        self.models = [make(rank, size, **options) for _ in range(engines) for rank in range(size)]
        self.receivers = [RankReceiver(m, CPU, describe_model, load or refuse_full) for m in self.models]
        self.epoch = 0

    def spec(self, **changes: Any) -> WeightGroupSpec:
        self.epoch += 1
        host, port = self.publisher.open_store()
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "backend": "gloo",
            "store_host": host,
            "store_port": port,
            "learner_layouts": (self.publisher.layout(),),
            "rollout_layouts": tuple(receiver.describe() for receiver in self.receivers),
            "wire_dtype": "float32",
            "round_bytes": 1000,
            "timeout_s": 40.0,
        }
        return WeightGroupSpec(**{**fields, **changes})

    def join(self, spec: WeightGroupSpec) -> None:
        run_all(
            lambda: self.publisher.join(spec),
            *(
                lambda r=rank, receiver=receiver: receiver.join(spec, 1 + r, spec.timeout_s)
                for rank, receiver in enumerate(self.receivers)
            ),
        )

    def push(self, version: int) -> tuple[PushReceipt, list[PushReceipt]]:
        sent, *received = run_all(
            lambda: self.publisher.publish(version),
            *(lambda receiver=receiver: receiver.receive(version, 40.0) for receiver in self.receivers),
        )
        return sent, received


def agree(sent: PushReceipt, received: list[PushReceipt]) -> bool:
    """Whether every rank reports the digests that the learner sent."""
    return disagreement(sent.reports[0], PushReceipt.merge(received).reports) is None


def refuse_full(_: Iterator[tuple[str, torch.Tensor]]) -> None:
    raise AssertionError("the general path was taken")


def start_all(*calls: Callable[[], Any]) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures


def run_all(*calls: Callable[[], Any]) -> list[Any]:
    return [future.result(120) for future in start_all(*calls)]


def check_parameters(fleet: Fleet, model: DenseModel, dtype: torch.dtype = torch.float32) -> None:
    """Every element is where the hand-written layout says, and the vocabulary's padding is zero."""
    named = dict(fleet.source.named_parameters())
    for rank, fake in enumerate(fleet.models):
        layout, shapes = tp_layout(model, rank % fleet.size, fleet.size)
        expected = {
            name: torch.full(shape, 0.0 if "embed" in name or "head" in name else float("nan"), dtype=dtype)
            for name, shape in shapes.items()
        }
        for part in layout.slices:
            value = named[part.name].detach()[part.box.slices].to(dtype)
            expected[part.param][part.local_box.slices] = value
        for name, value in expected.items():
            torch.testing.assert_close(fake.get_parameter(name), value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("size", "kv_heads", "tied"), [(1, 2, False), (2, 1, True), (4, 2, False), (8, 1, True)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_push_fills_every_rank(size: int, kv_heads: int, tied: bool, shared: bool) -> None:
    model = dense(kv_heads=kv_heads, tied=tied)
    fleet = Fleet(model, size)
    fleet.join(fleet.spec(shared=shared))
    for version in (1, 2):
        sent, received = fleet.push(version)
        check_parameters(fleet, model)
        reports = [report for receipt in received for report in receipt.reports]
        assert disagreement(sent.reports[0], reports) is None
        named = {n: p.detach().numpy() for n, p in fleet.source.named_parameters()}
        by_numpy = sum(digest_array(n, v.shape, Box.full(v.shape), v) for n, v in named.items()) % 2**64
        assert model_digest(sent.reports) == model_digest(reports) == by_numpy
        assert sent.num_bytes == sum(receipt.num_bytes for receipt in received)
        if not shared:
            assert sent.peak_extra_bytes <= 2 * size * 1000
        # What a rollout rank shares with the learner is the learner's.
        assert all(receipt.peak_extra_bytes <= 2 * 1000 * (not shared) for receipt in received)
        with torch.no_grad():
            for param in fleet.source.parameters():
                param.mul_(1.5).add_(0.25)


@pytest.mark.parametrize(
    ("engines", "size", "kv_heads", "round_bytes"), [(3, 1, 2, 1000), (2, 2, 1, 1000), (4, 1, 2, 1 << 20)]
)
def test_a_push_is_relayed_between_rollout_ranks(
    engines: int, size: int, kv_heads: int, round_bytes: int
) -> None:
    """Bytes that several need leave the learner once, all ranks end with the same, staging is two rounds."""
    model = dense(kv_heads=kv_heads)
    fleet = Fleet(model, size, engines=engines)
    fleet.join(fleet.spec(relay="always", round_bytes=round_bytes))
    distinct = {(p.name, p.box): p.box.volume for r in fleet.receivers for p in r.describe().slices}
    for version in (1, 2):
        sent, received = fleet.push(version)
        check_parameters(fleet, model)
        assert agree(sent, received)
        assert sent.num_bytes == 4 * sum(distinct.values())
        assert sent.num_bytes + sum(receipt.relayed_bytes for receipt in received) == sum(
            receipt.num_bytes for receipt in received
        )
        assert all(receipt.peak_extra_bytes <= 2 * round_bytes for receipt in received)
        assert sent.peak_extra_bytes <= 2 * round_bytes
        with torch.no_grad():
            for param in fleet.source.parameters():
                param.mul_(1.5).add_(0.25)


def test_a_rank_that_waits_for_an_absent_one_names_it() -> None:
    fleet = Fleet(dense(), 1, engines=2)
    spec = fleet.spec(timeout_s=3.0)
    waiting = start_all(lambda: fleet.publisher.join(spec), lambda: fleet.receivers[0].join(spec, 1, 3.0))
    for future in waiting:
        error = future.exception(120)
        assert isinstance(error, DeadlineError), error
        assert (error.phase, error.peer) == ("weight group join", RankRef(MemberKind.ROLLOUT, 1))


def test_a_join_that_is_called_off_ends_at_once() -> None:
    fleet = Fleet(dense(), 1, engines=2)
    spec = fleet.spec(timeout_s=LONG_S)
    waiting = start_all(lambda: fleet.publisher.join(spec), lambda: fleet.receivers[0].join(spec, 1, LONG_S))
    time.sleep(0.2)
    assert not any(future.done() for future in waiting)
    abandon(spec.store_host, spec.store_port, epoch=spec.epoch, lost="rollout-1", timeout_s=LONG_S)
    for future in waiting:
        error = future.exception(AT_ONCE_S)
        assert isinstance(error, PeerLostError), error
        assert error.peer == "rollout-1"
    fleet.receivers.pop()
    fleet.models.pop()
    fleet.join(fleet.spec())
    sent, received = fleet.push(1)
    assert agree(sent, received)


def test_a_rank_without_memory_for_staging_fails_before_anybody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Allocate, roll call, connect: over NCCL a rank that fails after the roll call hangs the others."""
    fleet = Fleet(dense(), 1, engines=2)
    spec = fleet.spec(timeout_s=LONG_S)
    allocate = WeightGroup._allocate

    def refuse(self: WeightGroup, sizes: Sequence[int]) -> list[torch.Tensor]:
        if self.rank == 2:
            raise WeightSyncError("no memory")
        return allocate(self, sizes)

    monkeypatch.setattr(WeightGroup, "_allocate", refuse)
    joins = [lambda n=n, r=r: r.join(spec, n, LONG_S) for n, r in enumerate(fleet.receivers, start=1)]
    learner, first, second = (
        future.exception(AT_ONCE_S) for future in start_all(lambda: fleet.publisher.join(spec), *joins)
    )
    assert isinstance(second, WeightSyncError)
    for error in (learner, first):
        assert isinstance(error, PeerLostError), error
        assert error.peer == RankRef(MemberKind.ROLLOUT, 1)


def test_a_failed_allocation_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(dense(), 1)

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(WeightSyncError, match=r"learner rank 0 has no memory .*staging_mib"):
            fleet.publisher.join(fleet.spec())


def test_a_connection_that_never_comes_up_ends_by_the_deadline_or_when_it_is_called_off() -> None:
    store, never = open_store("127.0.0.1", 20.0), threading.Event()
    connecting = Connecting(lambda: void(never.wait(LONG_S)), CPU)
    with pytest.raises(DeadlineError) as caught:
        connecting.wait(Deadline("weight group join", 0.2), Abandonment(store, 1))
    assert caught.value.peer == SOME_MEMBER
    threading.Timer(0.2, Abandonment(store, 1).call_off, [RankRef(MemberKind.ROLLOUT, 3)]).start()
    began = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        connecting.wait(Deadline("weight group join", LONG_S), Abandonment(store, 1))
    assert lost.value.peer == RankRef(MemberKind.ROLLOUT, 3)
    assert time.monotonic() - began < AT_ONCE_S
    assert connecting.is_alive()
    never.set()
    connecting.wait(Deadline("weight group join", 20.0), Abandonment(store, 2))
    with pytest.raises(WeightSyncError, match="plans differ"):
        Connecting(fail_with(WeightSyncError("plans differ")), CPU).wait(
            Deadline("j", 20.0), Abandonment(store, 2)
        )


def void(_: object) -> None:
    """Takes a result away."""


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_relay_that_leaves_frees_the_others_at_once() -> None:
    """Each waiting rank names the peer that it waits for: the relay, or one that gave up because of it."""
    fleet = Fleet(dense(), 1, engines=3)
    fleet.join(fleet.spec(relay="always", timeout_s=LONG_S))
    leaving = threading.Timer(0.3, fleet.receivers[1].leave)
    leaving.start()
    others = (fleet.receivers[0], fleet.receivers[2])
    futures = start_all(
        lambda: fleet.publisher.publish(1), *(lambda r=r: r.receive(1, LONG_S) for r in others)
    )
    errors = [future.exception(AT_ONCE_S) for future in futures]
    leaving.join()
    for error in errors:
        assert isinstance(error, PeerLostError), error
    assert RankRef(MemberKind.ROLLOUT, 1) in [error.peer for error in errors]
    fleet.receivers.pop(1)
    fleet.models.pop(1)
    fleet.join(fleet.spec(relay="always"))
    sent, received = fleet.push(2)
    assert agree(sent, received)


def test_a_relay_that_stalls_is_named_by_its_receiver() -> None:
    """It receives from the learner but relays nothing: the learner's part succeeds, its peer names it."""
    fleet = Fleet(dense(), 1, engines=2)
    fleet.join(fleet.spec(relay="always", round_bytes=1 << 20))
    relay = fleet.receivers[1]._group
    assert relay is not None
    arriving = relay._post_round(0, Deadline("first round", 20))
    began = time.monotonic()
    sending, waiting = start_all(
        lambda: fleet.publisher.publish(1), lambda: fleet.receivers[0].receive(1, 5.0)
    )
    arriving.wait(Deadline("first round", 20))
    assert sending.result(120).version == 1
    error = waiting.exception(120)
    assert isinstance(error, DeadlineError)
    assert error.peer == RankRef(MemberKind.ROLLOUT, 1)
    assert time.monotonic() - began > 4.9


def test_a_push_casts_to_the_wire_type() -> None:
    model = dense()
    fleet = Fleet(model, 2, dtype=torch.bfloat16)
    fleet.join(fleet.spec(wire_dtype="bfloat16"))
    sent, received = fleet.push(1)
    check_parameters(fleet, model, torch.bfloat16)
    assert agree(sent, received)
    assert sent.num_bytes * 2 == 4 * sum(
        part.box.volume for f in fleet.receivers for part in f.describe().slices
    )


@pytest.mark.parametrize("size", [1, 2])
def test_a_push_fills_transposed_experts_and_float32_gates_of_a_bfloat16_model(size: int) -> None:
    """As vLLM 0.24 keeps gpt-oss's experts and GLM-4.5's gates on a GPU."""
    fleet = Fleet(LearnersTensors(), size, build=fake_gpt_oss)
    fleet.join(fleet.spec(wire_dtype="bfloat16", round_bytes=60))
    sent, received = fleet.push(1)
    assert agree(sent, received)
    learned = {name: param.bfloat16() for name, param in fleet.source.named_parameters()}
    up, bias = learned[EXPERTS + "gate_up_proj"].chunk(size, 2), learned[EXPERTS + "gate_up_proj_bias"]
    down = learned[EXPERTS + "down_proj"].chunk(size, 1)
    for rank, model in enumerate(fleet.models):
        own = {name.removeprefix(EXPERTS + "routed_experts."): p for name, p in model.named_parameters()}
        assert torch.equal(own["w13_weight"], up[rank].mT)
        assert torch.equal(own["w13_bias"], bias.chunk(size, 1)[rank])
        assert torch.equal(own["w2_weight"], down[rank].mT)
        assert torch.equal(own["w2_bias"], learned[EXPERTS + "down_proj_bias"] * (rank == 0))
        assert own[ROUTER].dtype == torch.float32
        assert torch.equal(own[ROUTER], learned[ROUTER].float())


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (ROUTER, lambda gate: gate[1, 2].mul_(1 + 2**-20)),  # bfloat16 would not show it
        (ROUTER, lambda gate: gate[1, 2].mul_(2)),
        (EXPERTS + "routed_experts.w2_weight", lambda stack: stack[:, :4].copy_(stack[:, :4].mT.clone())),
    ],
)
def test_another_value_in_such_a_parameter_changes_the_digest(
    name: str, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    fleet = Fleet(LearnersTensors(), 1, build=fake_gpt_oss)
    fleet.join(fleet.spec(wire_dtype="bfloat16"))
    sent, _ = fleet.push(1)
    receiver = fleet.receivers[0]
    assert disagreement(sent.reports[0], [receiver.digest(1, "rollout 0")]) is None
    with torch.no_grad():
        spoil(fleet.models[0].get_parameter(name))
    assert disagreement(sent.reports[0], [receiver.digest(1, "rollout 0")]) is not None


@pytest.mark.parametrize(("engines", "relay"), [(1, "never"), (2, "always")])
def test_the_general_path_loads_full_tensors(engines: int, relay: str) -> None:
    """With a layer that no rule covers, each tensor arrives in full, once, in its own memory."""
    loaded: list[tuple[str, torch.Tensor]] = []

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        loaded.extend(tensors)

    model = dense()
    fleet = Fleet(model, 1, engines=engines, moe=True, load=load)
    fleet.join(fleet.spec(relay=relay))
    sent, received = fleet.push(1)
    assert agree(sent, received)
    assert sorted(name for name, _ in loaded) == sorted([*model.shapes()] * engines)
    if engines == 1:
        assert [name for name, _ in loaded] == list(model.shapes())
    named = dict(fleet.source.named_parameters())
    for name, tensor in loaded:
        assert torch.equal(tensor, named[name])


@pytest.mark.parametrize("shared", [False, True])
def test_the_general_path_does_not_care_for_the_default_device_of_the_loader(shared: bool) -> None:
    """vLLM's reload makes its GPU the default; what the ranks signal to each other is on the CPU."""
    loaded: list[tuple[str, torch.Tensor]] = []

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        with torch.device("meta"):
            loaded.extend(tensors)

    fleet = Fleet(dense(), 1, moe=True, load=load)
    fleet.join(fleet.spec(shared=shared))
    sent, received = fleet.push(1)
    assert agree(sent, received)
    named = dict(fleet.source.named_parameters())
    assert {name for name, _ in loaded} == named.keys()
    assert all(torch.equal(tensor, named[name]) for name, tensor in loaded)


def test_a_loader_that_stops_early_is_an_error() -> None:
    fleet = Fleet(dense(), 1, moe=True, load=lambda tensors: next(tensors))
    fleet.join(fleet.spec())
    futures = start_all(
        lambda: fleet.publisher.publish(1, timeout_s=LONG_S), lambda: fleet.receivers[0].receive(1, LONG_S)
    )
    with pytest.raises(WeightSyncError, match=r"took 1 of \d+ tensors"):
        futures[1].result(120)
    assert isinstance(futures[0].exception(120), PeerLostError)


def test_an_absent_member_costs_the_deadline_and_the_rest_form_a_new_group() -> None:
    fleet = Fleet(dense(), 2)
    spec = fleet.spec(timeout_s=2.0)
    futures = start_all(lambda: fleet.publisher.join(spec), lambda: fleet.receivers[0].join(spec, 1, 2.0))
    errors = [future.exception(120) for future in futures]
    for error in errors:
        assert isinstance(error, DeadlineError | PeerLostError), error
    fleet.receivers.pop()
    fleet.models.pop()
    layout = RankLayout.from_bytes(
        RankReceiver(fake_qwen2(dense(), 0, 1), CPU, describe_model, refuse_full).describe().to_bytes()
    )
    fleet.models = [fake_qwen2(dense(), 0, 1)]
    fleet.receivers = [RankReceiver(fleet.models[0], CPU, describe_model, refuse_full)]
    fleet.join(fleet.spec(rollout_layouts=(layout,)))
    sent, received = fleet.push(1)
    assert agree(sent, received)


def test_a_member_that_leaves_frees_the_others_at_once() -> None:
    fleet = Fleet(dense(), 2)
    fleet.join(fleet.spec(timeout_s=LONG_S))
    leaving = threading.Timer(0.3, fleet.receivers[1].leave)
    leaving.start()
    futures = start_all(lambda: fleet.publisher.publish(1), lambda: fleet.receivers[0].receive(1, LONG_S))
    error = futures[0].exception(AT_ONCE_S)
    assert isinstance(error, PeerLostError)
    assert error.peer == RankRef(MemberKind.ROLLOUT, 1)
    assert isinstance(futures[1].exception(AT_ONCE_S), PeerLostError)
    leaving.join()
    with pytest.raises(WeightSyncError, match="no weight group has been joined"):
        fleet.publisher.publish(2)


def test_a_learner_that_stalls_is_named_when_time_is_up() -> None:
    fleet = Fleet(dense(), 1)
    fleet.join(fleet.spec())
    began = time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"receiving weights of version 4: no answer from learner rank 0 within 1 s"
    ):
        fleet.receivers[0].receive(4, 1.0)
    assert 0.9 < time.monotonic() - began < AT_ONCE_S


def test_a_spec_of_another_model_is_refused_before_anything_connects() -> None:
    fleet = Fleet(dense(), 1)
    other = fsdp_layout(dense(hidden=8).shapes(), rank=0, world_size=1, dtype="float32")
    with pytest.raises(WeightSyncError, match="learner rank 0: the group spec describes other slices"):
        fleet.publisher.join(fleet.spec(learner_layouts=(other,), rollout_layouts=(other,)))
    with pytest.raises(WeightSyncError, match="group rank 0 is no rollout rank: these are 1..1"):
        fleet.receivers[0].join(fleet.spec(), 0, 1.0)


@pytest.mark.parametrize("shared", [False, True])
def test_several_learners_share_the_work_and_their_digests_add_up(shared: bool) -> None:
    model = dense(kv_heads=1)
    shapes, named = model.shapes(), dict(FlatModel(model.shapes(), seed=3).named_parameters())
    here = place_of(CPU)
    sources = [fsdp_layout(shapes, rank=r, world_size=3, dtype="float32").at(here) for r in range(3)]
    receivers = [RankReceiver(fake_qwen2(model, r, 2), CPU, describe_model, refuse_full) for r in range(2)]
    store = open_store("127.0.0.1", LONG_S)
    spec = WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host="127.0.0.1",
        store_port=store.port,
        learner_layouts=tuple(sources),
        rollout_layouts=tuple(receiver.describe() for receiver in receivers),
        wire_dtype="float32",
        round_bytes=777,
        timeout_s=LONG_S,
        shared=shared,
    )

    def learn(rank: int) -> torch.Tensor:
        own = None if rank else store
        group = group_kind(spec).form(
            spec, rank=rank, layout=sources[rank], device=CPU, timeout_s=LONG_S, store=own
        )
        shards = {part.param: named[part.name].detach()[part.box.slices] for part in sources[rank].slices}
        group.send(shards, Deadline("push", LONG_S))
        total = group.sum_at_first(torch.tensor([rank + 1, -(2**62)]), Deadline("sum", LONG_S))
        group.abort()
        return total

    def roll(rank: int) -> PushReceipt:
        receivers[rank].join(spec, 3 + rank, 10.0)
        return receivers[rank].receive(1, 10.0)

    *totals, first, second = run_all(
        *(lambda r=r: learn(r) for r in range(3)), lambda: roll(0), lambda: roll(1)
    )
    assert totals[0].tolist() == [6, 2**62]  # -3 * 2^62 modulo 2^64
    expected = sum(
        digest_array(n, tuple(p.shape), Box.full(tuple(p.shape)), p.detach().numpy())
        for n, p in named.items()
    )
    assert model_digest([*first.reports, *second.reports]) == expected % 2**64


def test_a_rollout_rank_elsewhere_takes_part_beside_those_that_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = dense()
    fleet = Fleet(model, 1, engines=2)
    describe = RankReceiver.describe

    def place(receiver: RankReceiver) -> RankLayout:
        layout = describe(receiver)
        return layout.at(RankPlace(node="elsewhere")) if receiver is fleet.receivers[1] else layout

    monkeypatch.setattr(RankReceiver, "describe", place)
    spec = fleet.spec(shared=True)
    assert spec.stand_ins == {1: 0}
    assert spec.wire_ranks == (0, 2)
    fleet.join(spec)
    for version in (1, 2):
        sent, received = fleet.push(version)
        check_parameters(fleet, model)
        assert agree(sent, received)
        assert [receipt.peak_extra_bytes > 0 for receipt in received] == [False, True]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_leaves_a_shared_group_frees_the_others_at_once(lost: int) -> None:
    fleet = Fleet(dense(), 1, engines=2)
    fleet.join(fleet.spec(shared=True, timeout_s=LONG_S))
    leaving = threading.Timer(0.3, fleet.receivers[lost].leave)
    leaving.start()
    other = fleet.receivers[1 - lost]
    sending, waiting = start_all(lambda: fleet.publisher.publish(1), lambda: other.receive(1, LONG_S))
    error = sending.exception(AT_ONCE_S)
    assert isinstance(error, PeerLostError), error
    assert error.peer == RankRef(MemberKind.ROLLOUT, lost)
    assert isinstance(waiting.exception(AT_ONCE_S), PeerLostError)
    leaving.join()
    fleet.join(fleet.spec(shared=True))
    sent, received = fleet.push(2)
    assert agree(sent, received)


def test_a_side_of_a_shared_group_that_stalls_is_named_when_time_is_up() -> None:
    fleet = Fleet(dense(), 1)
    fleet.join(fleet.spec(shared=True))
    with pytest.raises(DeadlineError, match="no answer from learner rank 0 within 1 s"):
        fleet.receivers[0].receive(1, 1.0)
    fleet.join(fleet.spec(shared=True, round_bytes=1000))
    with pytest.raises(DeadlineError, match="no answer from rollout rank 0 within 1 s"):
        fleet.publisher.publish(2, timeout_s=1.0)


def test_memory_that_cannot_be_opened_fails_the_join_for_all_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(dense(), 1)
    spec = fleet.spec(shared=True, timeout_s=LONG_S)
    announce = SharedGroup.announce

    def close_first(group: SharedGroup, store: Any) -> None:
        announce(group, store)
        for behind in group._behind:
            behind.staging.close()

    monkeypatch.setattr(SharedGroup, "announce", close_first)
    sending, opening = start_all(
        lambda: fleet.publisher.join(spec), lambda: fleet.receivers[0].join(spec, 1, LONG_S)
    )
    with pytest.raises(WeightSyncError, match=r"cannot be opened .* same container.*weights.backend: gloo"):
        opening.result(AT_ONCE_S)
    error = sending.exception(AT_ONCE_S)
    assert isinstance(error, PeerLostError), error
    assert error.peer == RankRef(MemberKind.ROLLOUT, 0)


def test_shared_memory_is_gone_when_the_group_is_left() -> None:
    fleet = Fleet(dense(), 1, engines=2)
    before = staging_files()
    for _ in range(2):
        fleet.join(fleet.spec(shared=True))
        assert len(staging_files() - before) == 2
        fleet.push(1)
    fleet.publisher.leave()
    for receiver in fleet.receivers:
        receiver.leave()
    assert staging_files() <= before  # others' may be gone, too


def staging_files() -> set[int]:
    """The staging that this process has open, as numbers of files; other threads close files meanwhile."""
    files = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "paceline-staging" in os.readlink(entry.path):
                files.add(os.stat(entry.path).st_ino)
    return files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(301,), (70, 41), (5, 7, 11)])
def test_torch_digests_equal_numpys_on_strided_views(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    box = Box(tuple(extent // 4 for extent in shape), tuple(extent - 1 for extent in shape))
    view = tensor[box.slices]
    pattern = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = view.to(dtype).contiguous().view(pattern).numpy()
    digester = TensorDigester(CPU)
    total = digester.add("some.weight", shape, box, view, dtype)
    assert digester.finish([total]) == [digest_array("some.weight", shape, box, bits)]
    assert math.prod(view.shape) == np.size(bits)
