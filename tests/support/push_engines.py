"""A real vLLM engine and learner processes: start it, generate greedily, form the group and push."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from paceline.core.samples.trajectory import SamplingSpec
from paceline.rollout.engines.base import Engine, SampleRequest
from paceline.rollout.engines.processes import EngineProcesses
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.rollout.engines.vllm.start import environment, prefork
from paceline.weights.plan.spec import WeightGroupSpec
from support.push_learners import LearnerGroup, report_of

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 12


@asynccontextmanager
async def running_engine(
    folder: Path, tp: int, monkeypatch: pytest.MonkeyPatch, **arguments: Any
) -> AsyncIterator[VllmEngine]:
    """The engine; `arguments` override those of a float32 engine without weights."""
    paths = [ROOT / "src", *(ROOT / "services").glob("*"), ROOT / "tests"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]))
    variables = environment.in_this_process() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "OMP_NUM_THREADS": "1",
    }
    if torch.cuda.is_available():
        # A forked engine hangs in its first parallel region if the tests' process has had one.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    else:
        environment.prepare_cpu(variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not torch.cuda.is_available():
        # As a rollout server starts it: its processes are forks of one that has imported vLLM.
        prefork.use(prefork.start())
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 128,
        "tensor_parallel_size": tp,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "support.corrupting_extension.CorruptingExtension",
        "disable_log_stats": True,
        "seed": 0,
    }
    processes = EngineProcesses()
    # Nothing but the engine refers to the AsyncLLM: it goes, with its ZeroMQ context, when the engine ends.
    engine = VllmEngine(
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **(options | arguments))), processes
    )
    processes.settle()
    try:
        yield engine
    finally:
        await engine.shutdown()


async def generate(engine: Engine, prompt: list[int], request_id: str) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs."""
    sampling = SamplingSpec(temperature=0.0, max_tokens=NUM_TOKENS)
    request = SampleRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, seed=0)
    [sample] = await engine.generate([request])
    return sample.token_ids.tolist(), sample.log_probs.tolist()


async def join(
    learners: LearnerGroup,
    engine: Engine,
    epoch: int,
    round_bytes: int,
    *,
    backend: Literal["gloo", "nccl"] = "gloo",
    wire_dtype: str = "float32",
) -> WeightGroupSpec:
    """Forms a group of all learners and the engine."""
    host, port = learners.call("store")[0]
    spec = WeightGroupSpec(
        epoch=epoch,
        backend=backend,
        store_host=host,
        store_port=port,
        learner_layouts=learners.layouts(),
        rollout_layouts=await engine.describe(),
        wire_dtype=wire_dtype,
        round_bytes=round_bytes,
        timeout_s=120.0,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(learners.call_async("join", spec.to_bytes()))
        tasks.create_task(engine.join(spec, spec.num_learners, 120.0))
    return spec


async def push(learners: LearnerGroup, engine: Engine, version: int) -> tuple[Any, Any, list[Any]]:
    """What was sent, what was received, and each learner's answer."""
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(learners.call_async("publish", version))
        receiving = tasks.create_task(engine.receive(version, 30.0))
    return report_of(sending.result()), receiving.result(), sending.result()
