"""Inputs of layers in host memory: the numbers of full recomputation, few buffers, and waits in order."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.config.training.memory import MemoryConfig
from paceline.core.errors import EnvironmentLackError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.distributed.catching_up import forget_broken_pass
from paceline.learner.distributed.host_memory import local_part
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import compiling, host_inputs
from paceline.learner.model.decoder.host_inputs import HostInputs
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, load_policy
from paceline.learner.model.networks import PolicyNetwork, body_of, decoder_layers
from paceline.learner.train.state.learner import Learner
from paceline.service.host_memory import free_host_bytes, host_bytes
from support.learner_fakes import VOCAB_SIZE, run_config
from support.learner_scenarios import numbers, take_step
from support.memory_faults import bits

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("ranks"),
    # torch's own, while it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

NUM_LAYERS = 4
GIB = 1 << 30
HIDDEN_BYTES = 24 * 4
"""Of a token's state in the tiny model."""


def inputs_of(network: PolicyNetwork) -> HostInputs:
    layer: Any = decoder_layers(body_of(network.lm))[0]
    inputs = layer._gradient_checkpointing_func.__self__
    assert isinstance(inputs, HostInputs)
    return inputs


def load(model: Path, ranks: Ranks, host: HostInputs | None = None) -> PolicyNetwork:
    options = LayerOptions(kept_share=0.0, host_inputs=host)
    return load_policy(model, ranks, Precision(compute=torch.float32), options=options)


def batch(num_rows: int = 3) -> MicroBatch:
    rng = np.random.default_rng(4)
    rows = [
        PackedRow(
            index=index,
            prompt_token_ids=rng.integers(2, VOCAB_SIZE, 5).astype(np.int32),
            response_token_ids=rng.integers(2, VOCAB_SIZE, 3 + index).astype(np.int32),
            response_mask=np.ones(3 + index, np.uint8),
            response_log_probs=np.zeros(3 + index, np.float32),
        )
        for index in range(num_rows)
    ]
    return pack(rows, torch.device("cpu"))


def run(network: PolicyNetwork, num_rows: int = 3) -> list[Tensor]:
    """Log-probs and all gradients."""
    log_probs = network(batch(num_rows)).log_probs
    log_probs.sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in network.parameters()]  # type: ignore[union-attr, operator]
    network.zero_grad()
    return [log_probs.detach(), *gradients]


def same(ours: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, others)) and len(ours) == len(others)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_steps_have_the_bits_of_full_recomputation_and_the_second_takes_no_new_memory(
    model: Path, ranks: Ranks, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of policy and critic, which share the buffers."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    results = []
    addresses: set[int] = set()
    for recompute in ("full", "from_host"):
        memory = {"recompute": recompute}
        actor = {"ppo_max_token_len_per_gpu": 96, "compile": compiled, "memory": memory}
        learner = Learner.build(run_config(model, actor=actor, critic={"warmup": 0}), ranks)
        metrics = [numbers(take_step(learner, step)) for step in (1, 2)]
        assert learner.critic is not None
        values = [local_part(parameter).tolist() for parameter in learner.critic.network.parameters()]
        results.append([metrics, bits(learner), values])
        if recompute == "full":
            continue
        inputs = inputs_of(learner.actor.network)
        assert inputs.num_bytes == NUM_LAYERS * (128 if compiled else 96) * HIDDEN_BYTES
        addresses = {buffer.data_ptr() for buffer in inputs._free}
        assert len(addresses) == NUM_LAYERS
        take_step(learner, 3)
        assert {buffer.data_ptr() for buffer in inputs._free} == addresses
    if compiled:
        torch._dynamo.reset()
    assert results[0] == results[1]
    assert results[0][0][0]["actor/grad_norm"] > 0.1


@dataclass
class Device:
    """Stands in for torch.cuda: notes the order of waits and copies, which a CPU makes at once."""

    events: list[str] = field(default_factory=list)
    num_copies: int = 0

    def current_stream(self, device: Any) -> Stream:
        return Stream(self, "layers")

    def Stream(self, device: Any) -> Stream:
        return Stream(self, "copies")

    def Event(self) -> Event:
        self.num_copies += 1
        return Event(self, self.num_copies)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert stream.name == "copies"
        yield


@dataclass
class Event:
    device: Device
    number: int

    def record(self, stream: Stream) -> None:
        self.device.events.append(f"copy {self.number}")


@dataclass
class Stream:
    device: Device
    name: str

    def wait_stream(self, other: Stream) -> None:
        assert (self.name, other.name) == ("copies", "layers")
        self.device.events.append("copies wait")

    def wait_event(self, event: Event) -> None:
        assert self.name == "layers"
        self.device.events.append(f"wait for {event.number}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    recorder = Device()
    monkeypatch.setattr(host_inputs, "get_device_module", lambda device: recorder)
    return recorder


def watch(network: PolicyNetwork, device: Device) -> list[StorageWeakRef]:
    """Notes when layers compute; returns the storages of their inputs."""
    storages: list[StorageWeakRef] = []

    def note(number: int, given: tuple[Tensor, ...]) -> None:
        device.events.append(f"layer {number}")
        storages.append(StorageWeakRef(given[0].untyped_storage()))

    for number, layer in enumerate(decoder_layers(body_of(network.lm))):
        layer.register_forward_pre_hook(lambda _, given, number=number: note(number, given))
    return storages


def test_copies_wait_for_layers_and_layers_for_copies(model: Path, ranks: Ranks, device: Device) -> None:
    network = load(model, ranks, HostInputs(num_tokens=9, limit=GIB))
    storages = watch(network, device)
    log_probs = network(batch()).log_probs
    assert device.events == [
        *("copies wait", "copy 1", "layer 0"),
        *("copies wait", "copy 2", "layer 1"),
        *("wait for 1", "copies wait", "copy 3", "layer 2"),
        *("wait for 2", "copies wait", "copy 4", "layer 3"),
    ]
    # The inputs of the last two layers are on the device, too.
    assert [storage.expired() for storage in storages] == [True, True, False, False]  # type: ignore[no-untyped-call]
    device.events.clear()
    log_probs.sum().backward()
    assert device.events == [
        *("layer 3",),
        *("copies wait", "copy 5", "layer 2"),
        *("copies wait", "copy 6", "wait for 5", "layer 1"),
        *("wait for 6", "layer 0"),
    ]


def test_a_pass_that_fails_backwards_gives_its_buffers_back(
    model: Path, ranks: Ranks, device: Device
) -> None:
    expected = run(load(model, ranks))
    network = load(model, ranks, HostInputs(num_tokens=9, limit=GIB))
    inputs, layers = inputs_of(network), decoder_layers(body_of(network.lm))
    assert same(run(network), expected)
    buffers = {buffer.data_ptr() for buffer in inputs._free}

    def fail(module: Any, given: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: 1 / 0)

    hook = layers[1].mlp.register_forward_hook(fail)
    device.events.clear()
    with pytest.raises(ZeroDivisionError):
        run(network)
    hook.remove()
    forget_broken_pass(network)
    gc.collect()
    # The input of layer 0 was under way, and its memory must outlive the copy.
    copies = [int(event.split()[-1]) for event in device.events if event.startswith("copy")]
    assert device.events[-1] == f"wait for {copies[-1]}"
    assert {buffer.data_ptr() for buffer in inputs._free} == buffers
    run(network)  # also reduces what the pass has left of its gradient
    assert same(run(network), expected)
    assert {buffer.data_ptr() for buffer in inputs._free} == buffers


def test_inputs_beyond_the_limit_stay_on_the_device(
    model: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture, device: Device
) -> None:
    expected = run(load(model, ranks))
    num_tokens = batch().input_ids.numel()
    network = load(model, ranks, HostInputs(num_tokens=1, limit=2 * num_tokens * HIDDEN_BYTES + 1))
    storages = watch(network, device)
    log_probs = network(batch()).log_probs
    assert [storage.expired() for storage in storages] == [True, True, False, False]  # type: ignore[no-untyped-call]
    del log_probs
    assert same(run(network), expected)
    assert inputs_of(network).num_bytes == 2 * num_tokens * HIDDEN_BYTES
    assert [record.message for record in caplog.records if "host memory" in record.message] == [
        (
            "0.0 GiB of host memory are used up, so inputs of further layers stay on the GPU; raise "
            "memory.host_gib if the host has more"
        )
    ]


def test_larger_micro_batches_replace_buffers_and_smaller_ones_share_them(model: Path, ranks: Ranks) -> None:
    network, plain = load(model, ranks, HostInputs(num_tokens=1, limit=GIB)), load(model, ranks)
    sizes = []
    for num_rows in (2, 4, 2):
        assert same(run(network, num_rows), run(plain, num_rows))
        sizes.append(inputs_of(network).num_bytes)
        assert sizes[-1] == sum(buffer.nbytes for buffer in inputs_of(network)._free)
        assert len(inputs_of(network)._free) == NUM_LAYERS
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_rank_takes_its_part_of_half_of_the_free_memory_or_what_the_file_says(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_inputs, "free_host_bytes", lambda: 64 * GIB)
    four = Ranks(**{name: getattr(ranks, name) for name in Ranks.__slots__} | {"num_local": 4})

    def limit(**memory: Any) -> float:
        inputs = HostInputs.of(MemoryConfig(recompute="from_host", **memory), num_tokens=9, ranks=four)
        assert inputs is not None
        return inputs._limit / GIB

    assert limit() == 8
    assert limit(host_gib=15.5) == 15.5
    with pytest.raises(EnvironmentLackError, match=r"host_gib=17 on each of 4 ranks .* 64.0 GiB.*at most 16"):
        limit(host_gib=17)
    for recompute in ("none", "full", 0.5):
        memory = MemoryConfig(recompute=recompute, host_gib=17)
        assert HostInputs.of(memory, num_tokens=9, ranks=four) is None


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    cgroups = {new: ("memory.max", "memory.current"), old: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    here = host_bytes(cgroups)
    assert here >= free_host_bytes(cgroups) > 0
    new.mkdir()
    (new / "memory.max").write_text("max\n")
    (new / "memory.current").write_text("900\n")
    assert host_bytes(cgroups) == here
    (new / "memory.max").write_text("1000\n")
    assert (host_bytes(cgroups), free_host_bytes(cgroups)) == (1000, 100)
    (new / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert free_host_bytes(cgroups) == 150
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("800\n")
    (old / "memory.usage_in_bytes").write_text("790\n")
    (old / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 20\n")
    assert (host_bytes(cgroups), free_host_bytes(cgroups)) == (800, 30)
