"""Engines under the contract suite, each with a learner that pushes into it and a way to kill it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.rollout.engines.base import Engine
from paceline.rollout.engines.rank_receiver import RankReceiver
from paceline.rollout.engines.weights.layout import describe_model
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt
from support.fake_engine import FakeEngine
from support.fake_vllm import fake_qwen2
from support.push_models import save_config, seeded_model, tiny_config
from support.weight_layouts import DenseModel

CPU = torch.device("cpu")
VOCAB, MAX_PROMPT, MAX_RESPONSE = 199, 160, 96
ROUND_BYTES = 20_000
ON_GPU = {
    "gpu_memory_utilization": 0.05,
    "sleep": "always",
    "engine_kwargs": {"enable_deterministic_inference": True},
}
"""Otherwise the shape of a batch would decide how bfloat16 rounds, and so which tokens are drawn."""
FAKE_SGLANG = str(Path(__file__).with_name("fake_sglang"))


class PushingLearner:
    """One learner rank in this process; `push` and `join` run beside the engine's part."""

    def __init__(self, model: nn.Module, *, device: torch.device = CPU, wire_dtype: str = "float32") -> None:
        self._publisher = WeightPublisher(model, device)
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._wire_dtype = wire_dtype
        self._epoch = 0
        self.layout = self._publisher.layout()

    async def spec(self, engine: Engine, **changes: Any) -> WeightGroupSpec:
        """The group of the next epoch: this learner and the engine."""
        self._epoch += 1
        host, port = self._publisher.open_store()
        spec = WeightGroupSpec(
            epoch=self._epoch,
            backend="gloo",
            store_host=host,
            store_port=port,
            learner_layouts=(self.layout,),
            rollout_layouts=await engine.describe(),
            wire_dtype=self._wire_dtype,
            round_bytes=ROUND_BYTES,
            timeout_s=120.0,
        )
        return replace(spec, **changes)

    async def join(self, engine: Engine, **changes: Any) -> WeightGroupSpec:
        """Forms the next epoch's group."""
        spec = await self.spec(engine, **changes)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._in_thread(lambda: self._publisher.join(spec)))
            tasks.create_task(engine.join(spec, spec.num_learners, 120.0))
        return spec

    async def push(self, engine: Engine, version: int) -> tuple[PushReceipt, PushReceipt]:
        """The receipts of the sender and of the engine; raises what the engine raises."""
        sending = asyncio.ensure_future(self._in_thread(lambda: self._publisher.publish(version)))
        try:
            received = await engine.receive(version, 20.0)
        finally:
            await asyncio.wait([sending])
        return sending.result(), received

    def close(self) -> None:
        """Leaves the group."""
        self._publisher.leave()
        self._threads.shutdown()

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class ContractLearner(PushingLearner):
    """A learner whose weights are those of a seed."""

    def __init__(self, config: Any, **options: Any) -> None:
        self._config, self._model = config, seeded_model(config, seed=0).to(options.get("device", CPU))
        super().__init__(self._model, **options)

    def set_seed(self, seed: int) -> None:
        """Takes over the weights of a seed."""
        with torch.no_grad():
            source = dict(seeded_model(self._config, seed).named_parameters())
            for name, param in self._model.named_parameters():
                param.copy_(source[name])

    async def push_seed(self, engine: Engine, seed: int, version: int) -> None:
        """Pushes the weights of a seed."""
        self.set_seed(seed)
        await self.push(engine, version)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """An engine under test.

    Attributes:
        kill: makes the engine die, as a crash would.
        fail: makes a request that is under way end with an error in the engine.
        freeze: stops the engine's processes, or lets them go on.
        processes: the engine's processes.
        has_versions: whether its samples tell which weights drew which tokens.
        dtype: of its parameters, and of pushes into it.
    """

    engine: Engine
    learner: ContractLearner
    kill: Callable[[], None]
    fail: Callable[[str], Coroutine[Any, Any, None]]
    freeze: Callable[[bool], None]
    processes: Callable[[], list[psutil.Process]]
    has_versions: bool = True
    dtype: str = "float32"


def _model_config() -> Any:
    config = tiny_config(kv_heads=2, tied=False)
    config.max_position_embeddings = MAX_PROMPT + MAX_RESPONSE
    return config


@asynccontextmanager
async def fake_subject(_: Path) -> AsyncIterator[Subject]:
    """The fake engine, with two ranks that receive into models shaped like vLLM's."""
    model = DenseModel(
        vocab_size=VOCAB,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate=160,
        layers=2,
        tied=False,
        bias=True,
    )

    def refuse(_: Any) -> None:
        raise AssertionError("this model is pushed in place")

    ranks = [RankReceiver(fake_qwen2(model, rank, 2), CPU, describe_model, refuse) for rank in range(2)]
    limit = MAX_PROMPT + MAX_RESPONSE
    engine = FakeEngine(ranks=ranks, vocab_size=VOCAB, max_model_len=limit, token_s=0.005)
    learner = ContractLearner(_model_config())

    async def fail(request_id: str) -> None:
        engine.fail(request_id)

    def freeze(stopped: bool) -> None:
        if stopped:
            engine.hold()
        else:
            engine.release()

    yield Subject(engine=engine, learner=learner, kill=engine.die, fail=fail, freeze=freeze, processes=list)
    learner.close()


@asynccontextmanager
async def vllm_subject(folder: Path) -> AsyncIterator[Subject]:
    """vLLM on the CPU, as a rollout server starts it."""
    from paceline.rollout.engines.vllm.engine import VllmEngine

    model = _model_config()
    save_config(model, folder)
    # Small blocks: a prompt of 80 tokens fills some, so that a stale prefix cache would show.
    config = _run_config(folder, "vllm", sampler="batched", engine_kwargs={"block_size": 32})
    environment, others = dict(os.environ), psutil.Process().children()
    engine = await VllmEngine.start(config)

    def processes() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child not in others]
        below = [process for child in children for process in child.children(recursive=True)]
        # multiprocessing's own, which end with this process and serve the next engine.
        servers = ("resource_tracker", "multiprocessing.forkserver")
        return [p for p in (*children, *below) if not any(name in " ".join(p.cmdline()) for name in servers)]

    def kill() -> None:
        next(process for process in processes() if "Worker" in process.name()).kill()

    async def fail(request_id: str) -> None:
        """What the engine core says of a request that it ends with an error, and ends it."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        states = engine._llm.output_processor.request_states
        (internal,) = [name for name in states if name.startswith(request_id)]
        output = EngineCoreOutput(internal, [], finish_reason=FinishReason.ERROR)
        engine._llm.output_processor.process_outputs([output])
        await engine._llm.engine_core.abort_requests_async([internal])

    def freeze(stopped: bool) -> None:
        for process in processes():
            process.suspend() if stopped else process.resume()

    learner = ContractLearner(model)
    yield Subject(engine=engine, learner=learner, kill=kill, fail=fail, freeze=freeze, processes=processes)
    learner.close()
    await engine.shutdown()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()  # vLLM leaves a ZeroMQ context to the collector, which warns: let it do so here


@asynccontextmanager
async def sglang_subject(folder: Path) -> AsyncIterator[Subject]:
    """SGLang as a rollout server starts it: on a GPU in bfloat16, if there is one, else on the CPU."""
    from paceline.rollout.engines.sglang.arguments import has_gpu
    from paceline.rollout.engines.sglang.engine import SglangEngine

    model = _model_config()
    save_config(model, folder)
    device, dtype = (torch.device("cuda", 0), "bfloat16") if has_gpu() else (CPU, "float32")
    on_device = ON_GPU if has_gpu() else {}
    engine = await SglangEngine.start(_run_config(folder, "sglang", dtype, **on_device))

    def processes() -> list[psutil.Process]:
        return [] if engine._link is None else [psutil.Process(each.pid) for each in engine._link._children]

    def kill() -> None:
        processes()[0].kill()

    async def fail(request_id: str) -> None:
        """What rank 0 says of a request that it ends with an error, and ends it."""
        from sglang.srt.managers.io_struct import AbortReq

        assert engine._link is not None
        (name,) = [name for name, each in engine._responses.items() if each.request.request_id == request_id]
        reason = {"type": "abort", "message": "an error", "status_code": 500, "err_type": "InternalError"}
        engine._end(name, reason)
        await engine._link.send(AbortReq(rid=name))

    def freeze(stopped: bool) -> None:
        for process in processes():
            process.suspend() if stopped else process.resume()

    learner = ContractLearner(model, device=device, wire_dtype=dtype)
    try:
        yield Subject(
            engine=engine,
            learner=learner,
            kill=kill,
            fail=fail,
            freeze=freeze,
            processes=processes,
            has_versions=False,
            dtype=dtype,
        )
    finally:
        learner.close()
        await engine.shutdown()


@asynccontextmanager
async def fake_sglang_subject(folder: Path) -> AsyncIterator[Subject]:
    """SGLang's engine and its processes, in which a small stand-in takes the place of SGLang."""
    with fake_sglang():
        async with sglang_subject(folder) as subject:
            yield subject


@contextmanager
def fake_sglang() -> Iterator[None]:
    """Has this process and its children find the stand-in, and no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.rollout.engines.sglang.arguments.has_gpu", lambda: False)
        patch.syspath_prepend(FAKE_SGLANG)
        patch.setenv("PYTHONPATH", os.pathsep.join([FAKE_SGLANG, os.environ.get("PYTHONPATH", "")]))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def _run_config(folder: Path, name: str, dtype: str = "float32", **rollout: Any) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {
                "train_files": "x.parquet",
                "max_prompt_length": MAX_PROMPT,
                "max_response_length": MAX_RESPONSE,
            },
            "model": {"path": str(folder), "dtype": dtype},
            "rollout": {"name": name, "max_num_seqs": 32, "threads": 1, **rollout},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )
