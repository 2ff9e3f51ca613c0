"""Learner processes with an FSDP2 model, driven over pipes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from paceline.sizing.machine import free_port
from paceline.weights.digest.agreement import DigestReport
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from support.forked import Forked

_PROGRAM = "from support.push_learners import learner_main; learner_main()"
_TIMEOUT_S = 60.0


class LearnerGroup:
    """Starts `size` processes; every call goes to all of them and returns their answers by rank.

    On "cuda" each process uses the GPU of its rank, and is no fork of one that has imported torch.
    `expert` of them have different experts, `tensor` different parts of the layers' matrices.
    """

    def __init__(
        self, config: dict[str, Any], size: int, device: str = "cpu", *, expert: int = 1, tensor: int = 1
    ) -> None:
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            words = (config, rank, size, port, device, expert, tensor)
            arguments = [json.dumps(word) for word in words]
            with theirs:
                self._processes.append(_started(["-c", _PROGRAM, *arguments], theirs.fileno(), device))
            self._pipes.append(Connection(ours.detach()))
        self._threads = ThreadPoolExecutor(max_workers=1)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Blocks until every rank has answered; raises what a rank raised."""
        for pipe in self._pipes:
            pipe.send((method, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_TIMEOUT_S):
                raise TimeoutError(f"learner {rank} does not answer {method}")
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def call_async(self, method: str, *args: Any) -> list[Any]:
        """The same from a running event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.call, method, *args)

    def layouts(self) -> tuple[RankLayout, ...]:
        """What each rank holds."""
        return tuple(RankLayout.from_bytes(data) for data in self.call("layout"))

    def kill(self, rank: int) -> None:
        """Kills one rank."""
        self._processes[rank].kill()

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
        self._threads.shutdown()


class _Learner:
    def __init__(
        self, config: dict[str, Any], rank: int, size: int, device: str, expert: int, tensor: int
    ) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig

        from paceline.learner.distributed.publisher import WeightPublisher
        from support.push_models import seeded_model

        self._config, self._rank = AutoConfig.for_model(**config), rank
        self._device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
        self._model = seeded_model(self._config, seed=0).to(self._device)
        mesh = init_device_mesh(device, (size,))
        for layer in self._model.model.layers:
            if expert > 1:
                self._divide_experts(
                    layer,
                    init_device_mesh(device, (size // expert, expert), mesh_dim_names=("shard", "expert")),
                )
            if tensor > 1:
                sizes = (size // tensor, tensor)
                self._divide_matrices(
                    layer, init_device_mesh(device, sizes, mesh_dim_names=("shard", "tensor"))
                )
            fully_shard(layer, mesh=mesh)
        self._computes = tensor == 1  # else ranks would have to share tokens
        fully_shard(self._model, mesh=mesh)
        self._publisher = WeightPublisher(self._model, self._device)

    def _divide_experts(self, layer: Any, mesh: Any) -> None:
        """As the learner does, before it has read the weights."""
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        from paceline.learner.model.architectures import stacks_of
        from paceline.learner.model.decoder.divided.expert_parallel import spread_experts

        for experts in [module for module in layer.modules() if stacks_of(module)]:
            experts.num_experts //= mesh.size(1)
            for name in stacks_of(experts):
                parts = getattr(experts, name).data.chunk(mesh.size(1))
                setattr(experts, name, nn.Parameter(parts[mesh.get_local_rank(1)].clone()))
            spread_experts(experts, mesh["expert"])
            fully_shard(experts, mesh=mesh["shard"])

    def _divide_matrices(self, layer: Any, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        from paceline.learner.distributed.mesh import RankGroup
        from paceline.learner.distributed.shards import own_part
        from paceline.learner.model.decoder.divided.tensor_parallel import divide_matrices, spread_matrices

        undivided = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        parts = divide_matrices(layer, mesh.size(1))
        group = RankGroup.of(mesh["tensor"].get_group())
        matrices = spread_matrices(parts, mesh["tensor"], group)
        for name, parameter in layer.named_parameters():
            own, box = own_part(parameter.detach())
            own.copy_(undivided[name][box.slices])
        fully_shard(matrices, mesh=mesh["shard"])

    def layout(self) -> bytes:
        return self._publisher.layout().to_bytes()

    def store(self) -> tuple[str, int] | None:
        return self._publisher.open_store() if self._rank == 0 else None

    def join(self, spec: bytes) -> None:
        self._publisher.join(WeightGroupSpec.from_bytes(spec))

    def publish(self, version: int) -> tuple[bytes, int]:
        receipt = self._publisher.publish(version)
        return receipt.reports[0].to_bytes() if receipt.reports else b"", receipt.num_bytes

    def leave(self) -> None:
        self._publisher.leave()

    def set_seed(self, seed: int) -> None:
        """Takes the weights of another seed, and leaves the model as after a forward without gradients."""
        import torch

        from paceline.learner.distributed.shards import own_box
        from support.push_models import seeded_model

        source = dict(seeded_model(self._config, seed).named_parameters())
        with torch.no_grad():
            for name, param in self._model.named_parameters():
                param.to_local().copy_(source[name][own_box(param).slices])
            if self._computes:
                self._model(torch.tensor([[1, 2, 3]], device=self._device))


def _started(words: Sequence[str], stdin: int, device: str) -> subprocess.Popen[str]:
    if device == "cpu":
        return Forked(words, stdin=stdin)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, *words], stdin=stdin, env=env, text=True)


def learner_main() -> None:
    """The program of a rank; its arguments are JSON, and its input is the connection to the group."""
    import torch
    import torch.distributed as dist

    config, rank, size, port, device, expert, tensor = map(json.loads, sys.argv[1:])
    pipe = Connection(os.dup(0))
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    learner = _Learner(config, rank, size, device, expert, tensor)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = getattr(learner, method)(*args)
        except Exception as error:  # noqa: BLE001
            answer = RuntimeError(f"learner {rank}: {type(error).__name__}: {error}")
        pipe.send(answer)
    dist.destroy_process_group()


def report_of(answers: list[tuple[bytes, int]]) -> DigestReport:
    """Learner rank 0's digests."""
    return DigestReport.from_bytes(answers[0][0])
