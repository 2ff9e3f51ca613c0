"""What vLLM draws from a tiny random model, against a Hugging Face forward pass."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.trajectory import Float32Array, SamplingSpec
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.engines.vllm.engine import VllmEngine

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and its imports warn about themselves
]

VOCAB = 96
SPEC = SamplingSpec(temperature=1.0, max_tokens=16, stop_token_ids=(1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of two layers with weights large enough that its distributions are far from uniform."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("tiny")
    Qwen2ForCausalLM(shape).save_pretrained(path)
    return path


def config(folder: Path, **rollout: Any) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet", "max_prompt_length": 48, "max_response_length": 16},
            "model": {"path": str(folder)},
            # A prefill budget of one longest sequence: prompts have to wait for their turn, none may be cut.
            "rollout": {"max_num_seqs": 32, "threads": 1, "engine_kwargs": {"max_num_batched_tokens": 64}}
            | rollout,
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    before = dict(os.environ)
    # A machine without a C++ compiler, and no kernels left from another day.
    os.environ["CXX"] = "/nonexistent/c++"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    started = await VllmEngine.start(config(folder), load_format="auto", worker_extension=None)
    yield started
    await started.shutdown()
    os.environ.clear()
    os.environ.update(before)
    gc.collect()  # vLLM leaves a ZeroMQ context to the collector, which warns: let it do so here


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(5, 45))] for _ in range(count)]


def requests(tag: str, spec: SamplingSpec = SPEC, count: int = 24) -> list[SampleRequest]:
    return [
        SampleRequest(
            request_id=f"{tag}:{i}", prompt_token_ids=prompt, sampling=spec, seed=1000 + i, cache_salt="v0"
        )
        for i, prompt in enumerate(prompts(count))
    ]


def reference(
    folder: Path, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> Float32Array:
    """Log-probabilities (R, vocabulary) of a float32 forward pass at the response's positions."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    result: Float32Array = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return result


def same(left: Sequence[Sample], right: Sequence[Sample]) -> bool:
    return [s.token_ids.tolist() for s in left] == [s.token_ids.tolist() for s in right]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_the_distribution_drawn_from(
    engine: VllmEngine, folder: Path, temperature: float
) -> None:
    asked = requests(f"t{temperature}", replace(SPEC, temperature=temperature), count=8)
    for request, sample in zip(asked, await engine.generate(asked), strict=True):
        full = reference(folder, request.prompt_token_ids, sample.token_ids.tolist(), temperature)
        expected = full[np.arange(len(sample.token_ids)), sample.token_ids]
        np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4)
        assert sample.log_probs.dtype == np.float32


async def test_greedy_takes_the_best_token_and_reports_it_at_temperature_1(
    engine: VllmEngine, folder: Path
) -> None:
    # Among sampled requests, because a mixed batch takes another way through the sampler.
    greedy = requests("greedy", replace(SPEC, temperature=0.0), count=4)
    mixed = await engine.generate([*greedy, *requests("beside", count=4)])
    alone = await engine.generate(requests("alone", replace(SPEC, temperature=0.0), count=4))
    assert same(mixed[:4], alone)
    for request, sample in zip(greedy, mixed, strict=False):
        full = reference(folder, request.prompt_token_ids, sample.token_ids.tolist(), 1.0)
        assert full.argmax(axis=-1).tolist() == sample.token_ids.tolist()
        np.testing.assert_allclose(sample.log_probs, full.max(axis=-1), atol=1e-4)


async def test_other_seeds_draw_from_the_same_distribution(engine: VllmEngine, folder: Path) -> None:
    """First tokens of 1,500 samples of one prompt against its probabilities: chi-square of likely ones."""
    spec = replace(SPEC, max_tokens=1, stop_token_ids=())
    prompt = prompts(1)[0]
    drawn = await engine.generate(
        [
            SampleRequest(request_id=f"chi:{i}", prompt_token_ids=prompt, sampling=spec, seed=i * 7919)
            for i in range(1500)
        ]
    )
    counts = np.bincount([int(s.token_ids[0]) for s in drawn], minlength=VOCAB)
    expected = np.exp(reference(folder, prompt, [0], 1.0)[0]) * len(drawn)
    likely = expected >= 5
    chi_square = float((((counts - expected) ** 2) / expected)[likely].sum())
    degrees = int(likely.sum())
    # Mean k, deviation sqrt(2k): five deviations.
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


async def test_two_tensor_parallel_ranks_draw_from_the_same_distribution(folder: Path) -> None:
    before = dict(os.environ)
    # With the extension that real runs have: its layouts say that each rank holds a part.
    engine = await VllmEngine.start(config(folder, tensor_model_parallel_size=2), load_format="auto")
    try:
        layouts = await engine.describe()
        heads = [part.box for layout in layouts for part in layout.slices if part.name == "lm_head.weight"]
        assert [(box.start[0], box.stop[0]) for box in heads] == [(0, 64), (64, VOCAB)]
        greedy = requests("greedy", replace(SPEC, temperature=0.0), count=4)
        samples = await engine.generate([*greedy, *requests("drawn", count=4)])
        for index, (request, sample) in enumerate(
            zip([*greedy, *requests("", count=4)], samples, strict=True)
        ):
            full = reference(folder, request.prompt_token_ids, sample.token_ids.tolist(), 1.0)
            expected = full[np.arange(len(sample.token_ids)), sample.token_ids]
            np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4)
            if index < len(greedy):
                assert full.argmax(axis=-1).tolist() == sample.token_ids.tolist()
    finally:
        await engine.shutdown()
        os.environ.clear()
        os.environ.update(before)
        gc.collect()
