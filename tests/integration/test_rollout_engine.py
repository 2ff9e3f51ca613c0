"""What vLLM draws from a tiny random model, against a Hugging Face forward pass."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.samples.trajectory import Float32Array, SamplingSpec
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.rollout.engines.vllm.start import model_class

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.torch,
    pytest.mark.timeout(900),
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
    started = await VllmEngine.start(config(folder, sampler="engine"), load_format="auto")
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


async def first_tokens(engine: VllmEngine, tag: str, num_tokens: int = 1) -> list[list[int]]:
    """Of 1,500 samples of one prompt, with seeds one after the other."""
    spec = replace(SPEC, max_tokens=num_tokens, stop_token_ids=())
    prompt = prompts(1)[0]
    drawn = await engine.generate(
        [
            SampleRequest(request_id=f"{tag}:{i}", prompt_token_ids=prompt, sampling=spec, seed=i)
            for i in range(1500)
        ]
    )
    return [sample.token_ids.tolist() for sample in drawn]


def check_distribution(tokens: Sequence[int], probs: Float32Array) -> None:
    """Chi-square of the likely tokens, and of all others as one."""
    counts, expected = np.bincount(tokens, minlength=VOCAB), probs * len(tokens)
    likely = expected >= 5
    pairs = [*zip(counts[likely], expected[likely], strict=True)]
    if expected[~likely].sum() >= 5:
        pairs.append((counts[~likely].sum(), expected[~likely].sum()))
    chi_square = sum(float((count - mean) ** 2 / mean) for count, mean in pairs)
    # Mean k, deviation sqrt(2k): five deviations.
    degrees = len(pairs) - 1
    assert degrees >= 3
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


async def test_other_seeds_draw_from_the_same_distribution(engine: VllmEngine, folder: Path) -> None:
    tokens = [first for (first,) in await first_tokens(engine, "chi")]
    check_distribution(tokens, np.exp(reference(folder, prompts(1)[0], [0], 1.0)[0]))


async def test_drawn_as_a_batch_samples_follow_the_distribution_their_seed_and_nothing_else(
    engine: VllmEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of this engine: from here on it draws batches."""
    call_workers = VllmEngine.call_workers

    async def late(subject: VllmEngine, method: str, *args: Any) -> Any:
        if method == "paceline_take_log_probs":  # the worker gets far ahead of those that fetch
            await asyncio.sleep(0.5)
        return await call_workers(subject, method, *args)

    monkeypatch.setattr(VllmEngine, "call_workers", late)
    greedy = requests("greedy before", replace(SPEC, temperature=0.0), count=4)
    before = await engine.generate(greedy)
    await engine.batch_draws()
    prompt = prompts(1)[0]
    pairs = await first_tokens(engine, "batched", num_tokens=2)
    firsts = [first for first, _ in pairs]
    check_distribution(firsts, np.exp(reference(folder, prompt, [0], 1.0)[0]))
    # What follows does not depend on what was drawn before, but through the model.
    common = int(np.bincount(firsts).argmax())
    seconds = [second for first, second in pairs if first == common]
    assert len(seconds) > 100
    check_distribution(seconds, np.exp(reference(folder, prompt, [common, 0], 1.0)[1]))
    # Nor on the neighbour's seed: the same token after itself is as frequent as by chance.
    probs = np.bincount(firsts, minlength=VOCAB) / len(firsts)
    chance = float((probs**2).sum())
    same_as_next = sum(a == b for a, b in pairwise(firsts)) / (len(firsts) - 1)
    assert abs(same_as_next - chance) < 5 * (chance * (1 - chance) / len(firsts)) ** 0.5

    asked = requests("together")
    together = await engine.generate([*asked, *requests("greedy after", replace(SPEC, temperature=0.0), 4)])
    assert same(together[-4:], before)
    alone = [
        (await engine.generate([replace(request, request_id=f"alone {i}")]))[0]
        for i, request in enumerate(asked[:6])
    ]
    assert same(alone, together[:6])
    for request, sample in zip(asked, together, strict=False):
        full = reference(folder, request.prompt_token_ids, sample.token_ids.tolist(), 1.0)
        expected = full[np.arange(len(sample.token_ids)), sample.token_ids]
        np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4)


async def test_two_tensor_parallel_ranks_draw_from_the_same_distribution(folder: Path) -> None:
    before = dict(os.environ)
    # As a batch: both ranks draw, and have to draw the same.
    engine = await VllmEngine.start(
        config(folder, tensor_model_parallel_size=2, sampler="batched"), load_format="auto"
    )
    try:
        assert len(await engine.describe()) == 2
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


async def test_no_other_interpreter_is_asked_about_the_models_class(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models import registry

    def ask(_: Any) -> Any:
        raise AssertionError("vLLM starts another interpreter")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # what it was told before is kept there
    monkeypatch.setattr(registry, "_run_in_subprocess", ask)
    lazily = "vllm.model_executor.models.qwen2:Qwen2ForCausalLM"
    registry.ModelRegistry.register_model("Qwen2ForCausalLM", lazily)
    model_class.load(folder)
    chosen = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True).create_model_config()
    assert chosen.architecture == "Qwen2ForCausalLM"


async def test_what_cannot_be_loaded_is_left_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("Broken", "paceline.nowhere:Broken")
    before = dict(ModelRegistry.models)
    model_class.load(tmp_path)  # a folder without config.json
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard", "Broken"]}')
    model_class.load(tmp_path)
    assert ModelRegistry.models == before
