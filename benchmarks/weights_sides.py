"""The two sides of a weight push for `weights.py`, each in its own process, with the baselines.

A learner rank has the real publisher, an engine the real receiver.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES

from paceline.core.members import EnginePart
from paceline.core.samples.trajectory import SamplingSpec
from paceline.rollout.engines.base import SampleRequest
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table: a model, learner ranks, engines and their tensor-parallel size."""

    shape: str
    num_learners: int
    num_engines: int
    parallel_size: int
    device: str
    colocated: bool = False

    @property
    def dtype(self) -> str:
        """Element type of the engines' parameters and on the wire."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def name(self) -> str:
        """The case in the form of the arguments."""
        return f"{self.shape} {self.num_learners} -> {self.num_engines}x{self.parallel_size}"


class Learner:
    """One FSDP2 rank with the real publisher; its random float32 weights are made on its device."""

    def __init__(self, case: Case, rank: int, port: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from transformers import AutoModelForCausalLM, Qwen2Config

        from paceline.learner.distributed.publisher import WeightPublisher

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.device = torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
        if case.device == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if case.device == "cuda" else "gloo", rank=rank, world_size=case.num_learners
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[case.shape]), dtype=torch.float32)
        mesh = init_device_mesh(case.device, (case.num_learners,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=self.device)
        self.locals = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
        with torch.no_grad():
            for part in self.locals:
                part.normal_(std=0.02)
        self.rank = rank
        self.publisher = WeightPublisher(model, self.device)

    def layout(self) -> tuple[bytes, tuple[str, int] | None]:
        """Returns the rank's layout and, from rank 0, the rendezvous address."""
        return self.publisher.layout().to_bytes(), self.publisher.open_store() if self.rank == 0 else None

    def join(self, spec: bytes) -> None:
        """Joins the group."""
        self.publisher.join(WeightGroupSpec.from_bytes(spec))

    @torch.no_grad()
    def change(self) -> None:
        """Changes the weights."""
        for part in self.locals:
            part.mul_(1.01)
        self._synchronize()

    def push(self, version: int) -> dict[str, Any]:
        """Sends the rank's part; returns the time at which it began, and the receipt."""
        began = time.perf_counter()
        return {"began": began, "receipt": self.publisher.publish(version).to_bytes()}

    def plain(self, repeats: int) -> list[float]:
        """Exchanges plain messages with the same bytes."""
        from weights_exchange import plain_messages

        group = self.publisher._group
        assert group is not None
        return plain_messages(group, repeats)

    def usual_join(self, spec: bytes) -> None:
        """Rank 0 joins the broadcast group."""
        from weights_exchange import Broadcast

        if self.rank == 0:
            self.broadcast = Broadcast(
                WeightGroupSpec.from_bytes(spec), 0, self.device, self.publisher._store
            )

    @torch.no_grad()
    def usual(self, dtype: str) -> dict[str, float]:
        """Gathers every tensor; rank 0 broadcasts them."""
        began = time.perf_counter()
        wire = getattr(torch, dtype)

        def full() -> Iterator[tuple[str, torch.Tensor]]:
            for name, param in self.publisher._parameters().items():
                yield name, param.to(wire).full_tensor()  # type: ignore[attr-defined]

        if self.rank == 0:
            self.broadcast.send(full())
        else:
            for _ in full():
                pass
        self._synchronize()
        return {"began": began, "ended": time.perf_counter()}

    def usual_leave(self) -> None:
        """Leaves the broadcast group."""
        if self.rank == 0:
            self.broadcast.close()

    def names(self) -> list[tuple[str, list[int]]]:
        """Name and shape of every tensor in the order of the broadcast."""
        return [(name, list(param.shape)) for name, param in self.publisher._parameters().items()]

    def memory(self, reset: bool) -> dict[str, int]:
        """Returns the bytes allocated now, and the peak since the last reset."""
        if self.device.type != "cuda":
            return {"now": 0, "peak": 0}
        memory = {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return memory

    def free(self) -> int:
        """Returns the free bytes of the rank's GPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def trace(self, folder: str | None) -> None:
        """Begins a trace, or ends it and writes the file of this rank."""
        from weights_exchange import Trace

        if folder is None:
            self.tracing = Trace()
            self.tracing.begin()
        else:
            self.tracing.end(Path(folder) / f"learner-rank-{self.rank}.json.gz")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Server:
    """One engine, started as a rollout server starts it."""

    def __init__(self, case: Case, folder: str) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(HERE))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._start(case, folder))

    async def _start(self, case: Case, folder: str) -> None:
        from paceline.config.load import parse
        from paceline.config.run import RunConfig
        from paceline.rollout.engines.vllm.engine import VllmEngine

        engine_kwargs = {"kv_cache_memory_bytes": 2 << 30} if case.device == "cuda" else {}
        rollout = {
            "tensor_model_parallel_size": case.parallel_size,
            "enforce_eager": True,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.3,
            "engine_kwargs": engine_kwargs,
            "sleep": "always" if case.colocated else "never",
        }
        config = parse(
            RunConfig,
            {
                "model": {"path": folder, "dtype": case.dtype},
                "data": {"train_files": "none", "max_prompt_length": 128, "max_response_length": 128},
                "rollout": rollout,
                "reward": {"functions": [{"name": "exact_match"}]},
                "trainer": {"total_steps": 1},
            },
        )
        replies: list[dict[str, Any]] = []

        class Recording(VllmEngine):
            """Keeps the workers' last replies to a receive."""

            async def call_workers(
                self, method: str, args: tuple[Any, ...], timeout_s: float
            ) -> list[dict[str, Any]]:
                answers = await super().call_workers(method, args, timeout_s)
                if method == "paceline_receive":
                    replies[:] = answers
                return answers

        self.engine = await Recording.start(config, worker_extension="weights_worker.TimedExtension")
        self.replies = replies

    def call(self, method: str, *args: Any) -> Any:
        """Runs a coroutine of this class, or the worker method of that name on every rank."""
        own = getattr(self, method, None)
        work = own(*args) if own is not None else self._everywhere(method, args)
        return self.loop.run_until_complete(work)

    async def layout(self) -> list[bytes]:
        """Returns the layout of each rank."""
        return [layout.to_bytes() for layout in await self.engine.describe()]

    async def join(self, spec: bytes, offset: int) -> None:
        """All ranks join."""
        await self.engine.join(WeightGroupSpec.from_bytes(spec), offset, TIMEOUT_S)

    async def push(self, version: int) -> dict[str, Any]:
        """Receives as a server does; also returns the times of each rank."""
        ordered = time.perf_counter()
        receipt = await self.engine.receive(version, TIMEOUT_S)
        ended = time.perf_counter()
        ranks = [PushReceipt.from_bytes(reply["receipt"]) for reply in self.replies]
        return {
            "call_ms": 1e3 * (min(reply["began"] for reply in self.replies) - ordered),
            "reset_ms": 1e3 * (ended - max(reply["ended"] for reply in self.replies)),
            "received": max(
                reply["began"] + 1e-3 * rank.transfer_ms
                for reply, rank in zip(self.replies, ranks, strict=True)
            ),
            "rank_bytes": [rank.num_bytes for rank in ranks],
            "receipt": receipt.to_bytes(),
        }

    async def sleep(self) -> float:
        """Frees weights and KV cache; returns milliseconds."""
        began = time.perf_counter()
        await self.engine.sleep()
        return 1e3 * (time.perf_counter() - began)

    async def wake(self, part: str) -> float:
        """Allocates a part again; returns milliseconds."""
        began = time.perf_counter()
        await self.engine.wake(EnginePart(part))
        return 1e3 * (time.perf_counter() - began)

    async def draw(self, num_tokens: int) -> tuple[float, list[int]]:
        """Draws greedy tokens; returns milliseconds and the tokens."""
        spec = SamplingSpec(temperature=0.0, max_tokens=num_tokens)
        request = SampleRequest(
            request_id=f"draw {time.perf_counter()}",
            prompt_token_ids=list(range(5, 69)),
            sampling=spec,
            seed=0,
        )
        began = time.perf_counter()
        (sample,) = await self.engine.generate([request])
        return 1e3 * (time.perf_counter() - began), sample.token_ids.tolist()

    async def leave(self) -> None:
        """All ranks leave."""
        await self.engine.leave()

    async def stop(self) -> None:
        """Ends the engine."""
        await self.engine.shutdown()

    async def _everywhere(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return await self.engine.call_workers(method, args, TIMEOUT_S)


def serve(pipe: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    """Runs one process: makes the object, then calls the methods that the pipe names."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    try:
        served: Any = Learner(*arguments) if kind == "learner" else Server(*arguments)
        pipe.send(None)
        while True:
            method, args = pipe.recv()
            target = getattr(served, method) if kind == "learner" else served.call
            pipe.send(target(*args) if kind == "learner" else target(method, *args))
    except EOFError:
        if kind == "server":
            served.call("stop")
    except Exception as error:  # noqa: BLE001  the parent process shows it
        traceback.print_exc()
        pipe.send(error)
