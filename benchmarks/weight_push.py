"""How long a weight push takes over gloo on this machine, by model size and number of receivers.

    python benchmarks/weight_push.py [--repeats 10]

Two FSDP2 learner processes push a Qwen2-shaped float32 model to one and to two plain receiver processes,
which have the slices of tensor-parallel ranks but no engine. `push` is the time from the order until every
process has its digest, `transfer` that of the slowest sender's cast, pack and send, `digest` that of the
slowest receiver's digest. The baseline, `raw`, moves the same bytes in the same run as one contiguous gloo
message per (learner, receiver) pair: no packing, no digest.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.weights.digest.agreement import DigestReport, SliceDigest, disagreement
from paceline.weights.digest.job import TensorDigester
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice, tensor_shapes
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.group import WeightGroup
from paceline.weights.transport.rendezvous import Deadline

NUM_LEARNERS = 2
TIMEOUT_S = 60.0
CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, int]] = {
    "demo": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 5, "vocab_size": 1024},
    "10M": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 7, "vocab_size": 4096},
    "100M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 11, "vocab_size": 20480},
}


def receiver_layout(shapes: dict[str, tuple[int, ...]], rank: int, size: int) -> RankLayout:
    """What a tensor-parallel rank needs: columns of o_proj and down_proj, rows of other matrices, vectors."""
    slices = []
    for name, shape in shapes.items():
        box = Box.full(shape)
        if len(shape) == 2:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            width = shape[dim] // size
            box = box.split(dim, (rank + 1) * width)[0].split(dim, rank * width)[1]
        slices.append(
            TensorSlice(name=name, global_shape=shape, box=box, param=name, offset=(0,) * len(shape))
        )
    return RankLayout(dtype="float32", slices=tuple(slices))


class Learner:
    """One FSDP2 rank with the real publisher."""

    def __init__(self, rank: int, port: int, config: dict[str, int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM, Qwen2Config

        from paceline.learner.distributed.publisher import WeightPublisher

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
        dist.init_process_group("gloo", rank=rank, world_size=NUM_LEARNERS)
        heads = config["hidden_size"] // 64
        qwen = Qwen2Config(**config, num_attention_heads=heads, num_key_value_heads=heads)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(qwen, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (NUM_LEARNERS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.rank = rank
        self.publisher = WeightPublisher(model, CPU)

    def layout(self) -> bytes:
        """Its shards."""
        return self.publisher.layout().to_bytes()

    def store(self) -> tuple[str, int] | None:
        """The rendezvous address, from rank 0."""
        return self.publisher.open_store() if self.rank == 0 else None

    def join(self, spec: bytes) -> None:
        """Joins the group."""
        self.publisher.join(WeightGroupSpec.from_bytes(spec))

    def push(self, version: int) -> tuple[float, bytes]:
        """Milliseconds of the transfer, and the digests."""
        receipt = self.publisher.publish(version)
        reports = receipt.reports
        return receipt.transfer_ms, reports[0].to_bytes() if reports else b""

    def raw(self) -> None:
        """The same bytes per receiver, in one message each."""
        group = self.publisher._group
        assert group is not None
        raw_exchange(group, sending=True)


class Receiver:
    """One rollout rank that has only the destination tensors."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.size, self.digester = rank, size, TensorDigester(CPU)

    def layout(self, shapes: dict[str, tuple[int, ...]]) -> bytes:
        """Makes the tensors that it needs of a model of these shapes; returns their layout."""
        self.own = receiver_layout(shapes, self.rank, self.size)
        self.params = {part.param: torch.zeros(part.box.shape) for part in self.own.slices}
        return self.own.to_bytes()

    def join(self, spec: bytes) -> None:
        """Joins the group."""
        self.group = WeightGroup.form(
            WeightGroupSpec.from_bytes(spec),
            rank=NUM_LEARNERS + self.rank,
            layout=self.own,
            device=CPU,
            timeout_s=TIMEOUT_S,
        )

    def push(self, version: int) -> tuple[float, bytes]:
        """Milliseconds of the digest, and the digests."""
        for pieces in self.group.receive(Deadline("receive", TIMEOUT_S)):
            for piece, values in pieces:
                self.params[piece.destination_param][piece.destination_box.slices].copy_(values)
        began = time.perf_counter()
        totals = [
            self.digester.add(p.name, p.global_shape, p.box, self.params[p.param], torch.float32)
            for p in self.own.slices
        ]
        values = self.digester.finish(totals)
        digest_ms = 1e3 * (time.perf_counter() - began)
        slices = tuple(
            SliceDigest(name=p.name, global_shape=p.global_shape, box=p.box, value=value)
            for p, value in zip(self.own.slices, values, strict=True)
        )
        return digest_ms, DigestReport.of(
            rank=f"rollout rank {self.rank}", version=version, slices=slices
        ).to_bytes()

    def raw(self) -> None:
        """Receives the learners' raw messages."""
        raw_exchange(self.group, sending=False)


def raw_exchange(group: WeightGroup, *, sending: bool) -> None:
    """One message per pair, of as many bytes as a push moves between the two."""
    sizes: dict[int, int] = {}
    for key, size in group.plan.message_sizes.items():
        rank, peer = (key.sender, key.receiver) if sending else (key.receiver, key.sender)
        if rank == group.rank:
            sizes[peer] = sizes.get(peer, 0) + size
    messages = [(torch.zeros(size), peer, 9) for peer, size in sizes.items()]
    deadline = Deadline("raw", TIMEOUT_S)
    group._post(messages if sending else [], [] if sending else messages, deadline).wait(deadline)


def serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs one process: makes the object, then calls the methods that the pipe names."""
    torch.set_num_threads(1)
    served = make(*arguments)
    pipe.send(None)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(served, method)(*args))


def call_all(pipes: list[Connection], method: str, *args: Any) -> list[Any]:
    """Calls all processes at once; answers by process."""
    for pipe in pipes:
        pipe.send((method, args))
    return answers(pipes)


def answers(pipes: list[Connection]) -> list[Any]:
    """One answer of each process."""
    for pipe in pipes:
        if not pipe.poll(3 * TIMEOUT_S):
            sys.exit("a process does not answer")
    return [pipe.recv() for pipe in pipes]


def measure(config: dict[str, int], num_receivers: int, repeats: int) -> dict[str, float]:
    """Medians of one configuration."""
    context, pipes, processes = get_context("spawn"), [], []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (Learner, (rank, port, config)) for rank in range(NUM_LEARNERS)
    ]
    jobs += [(Receiver, (rank, num_receivers)) for rank in range(num_receivers)]
    for make, arguments in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, make, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers(pipes)
        return exchange(pipes, repeats)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def exchange(pipes: list[Connection], repeats: int) -> dict[str, float]:
    """Forms the group, then alternates pushes and raw messages."""
    learners, receivers = pipes[:NUM_LEARNERS], pipes[NUM_LEARNERS:]
    layouts = [RankLayout.from_bytes(data) for data in call_all(learners, "layout")]
    shapes = tensor_shapes(layouts)
    needed = [RankLayout.from_bytes(data) for data in call_all(receivers, "layout", shapes)]
    host, port = call_all(learners, "store")[0]
    spec = WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host=host,
        store_port=port,
        learner_layouts=tuple(layouts),
        rollout_layouts=tuple(needed),
        wire_dtype="float32",
        round_bytes=16 << 20,
        timeout_s=TIMEOUT_S,
    )
    began = time.perf_counter()
    call_all(pipes, "join", spec.to_bytes())
    joined_ms = 1e3 * (time.perf_counter() - began)
    rows: list[tuple[float, float, float, float]] = []
    for version in range(repeats + 2):
        began = time.perf_counter()
        results = call_all(pipes, "push", version)
        push_ms = 1e3 * (time.perf_counter() - began)
        received = [DigestReport.from_bytes(data) for _, data in results[NUM_LEARNERS:]]
        difference = disagreement(DigestReport.from_bytes(results[0][1]), received)
        if difference is not None:
            sys.exit(difference)
        began = time.perf_counter()
        call_all(pipes, "raw")
        raw_ms = 1e3 * (time.perf_counter() - began)
        transfer_ms = max(ms for ms, _ in results[:NUM_LEARNERS])
        rows.append((push_ms, transfer_ms, max(ms for ms, _ in results[NUM_LEARNERS:]), raw_ms))
    push, transfer, digest, raw = (statistics.median(column) for column in zip(*rows[2:], strict=True))
    num_bytes = 4 * sum(part.box.volume for part in needed[0].slices)
    params = sum(part.box.volume for layout in layouts for part in layout.slices)
    return {
        "params": params,
        "receiver_bytes": num_bytes,
        "join": joined_ms,
        "push": push,
        "transfer": transfer,
        "digest": digest,
        "raw": raw,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    table = Table(title=f"weight push, {NUM_LEARNERS} FSDP2 ranks, float32, gloo, medians of {repeats}")
    headings = ("model", "params", "receivers", "MB each", "join ms", "push ms", "transfer ms", "digest ms")
    for heading in (*headings, "raw ms", "GB/s each", "push / raw"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, config in SHAPES.items():
        for num_receivers in (1, 2):
            row = measure(config, num_receivers, repeats)
            mb = row["receiver_bytes"] / 1e6
            cells = [name, f"{row['params'] / 1e6:.2f} M", str(num_receivers), f"{mb:.1f}"]
            cells += [f"{row[key]:.1f}" for key in ("join", "push", "transfer", "digest", "raw")]
            cells += [f"{mb / row['push']:.2f}", f"{row['push'] / row['raw']:.2f}"]
            table.add_row(*cells)
    console = Console(width=140)
    console.print(table)
    console.print(f"machine: {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    console.print(f"command: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
