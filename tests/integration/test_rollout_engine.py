"""The real engine on a tiny random model, against a Hugging Face forward pass."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import InvalidMessageError, PeerLostError
from paceline.core.trajectory import FinishReason, Float32Array, SamplingSpec
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.weights.geometry.layout import RankLayout

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


async def test_a_seed_gives_the_same_sample_whatever_else_is_under_way(engine: VllmEngine) -> None:
    asked = requests("first")
    first = await engine.generate(asked)
    assert len({tuple(s.token_ids) for s in first}) == len(first)
    order = list(range(len(asked)))
    random.Random(1).shuffle(order)
    others = [replace(r, request_id=f"o{i}", seed=i) for i, r in enumerate(requests("x"))]
    shuffled, _ = await asyncio.gather(
        engine.generate([replace(asked[i], request_id=f"again:{i}") for i in order]), engine.generate(others)
    )
    assert same([shuffled[order.index(i)] for i in range(len(asked))], first)
    one_by_one = [
        (await engine.generate([replace(r, request_id=f"solo:{i}")]))[0] for i, r in enumerate(asked[:6])
    ]
    assert same(one_by_one, first[:6])
    for left, right in zip(one_by_one, first, strict=False):
        np.testing.assert_allclose(left.log_probs, right.log_probs, atol=1e-5)


async def test_other_seeds_draw_from_the_same_distribution(engine: VllmEngine, folder: Path) -> None:
    """First tokens of 1,500 samples of one prompt against its probabilities: chi-square over the likely tokens."""
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


async def test_finish_reasons_and_the_token_that_ends(engine: VllmEngine) -> None:
    samples = await engine.generate(requests("finish", count=32))
    stopped = [s for s in samples if s.finish_reason is FinishReason.STOP]
    full = [s for s in samples if s.finish_reason is FinishReason.LENGTH]
    assert len(stopped) + len(full) == 32
    assert stopped
    assert full
    for sample in stopped:
        assert sample.token_ids[-1] in (1, 2)
        assert not np.isin(sample.token_ids[:-1], (1, 2)).any()
    assert {len(s.token_ids) for s in full} == {16}
    assert all(len(s.log_probs) == len(s.token_ids) for s in samples)


async def test_cancelling_aborts_and_leaves_nothing_behind(engine: VllmEngine) -> None:
    asked = requests("first2")
    task = asyncio.create_task(engine.generate(asked))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.reset_prefix_cache()
    assert len(await engine.generate(asked)) == len(asked)


async def test_a_prompt_that_is_too_long_is_refused_and_the_rest_goes_on(engine: VllmEngine) -> None:
    good = requests("good", count=2)
    bad = replace(good[0], request_id="bad", prompt_token_ids=[5] * 65)
    with pytest.raises(InvalidMessageError, match="the engine refuses request bad"):
        await engine.generate([good[0], bad])
    assert len(await engine.generate([replace(good[0], request_id="good again")])) == 1
    assert await engine.reset_prefix_cache()


async def test_the_vocabulary_is_the_models(engine: VllmEngine) -> None:
    assert engine.vocab_size == VOCAB


# Last: it takes the engine down.
async def test_a_dead_worker_is_noticed_and_shutdown_leaves_no_process(
    engine: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    children = [
        process
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(process.cmdline())
    ]
    workers = [process for process in children if "Worker" in process.name()]
    assert workers
    await engine.check_health()
    task = asyncio.create_task(engine.generate(requests("doomed")))
    await asyncio.sleep(0.01)
    workers[0].kill()
    with pytest.raises(PeerLostError, match="the inference engine has died"):
        await asyncio.wait_for(task, 30)
    with pytest.raises(PeerLostError):
        await engine.check_health()
    await engine.shutdown()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    caplog.clear()  # vLLM's record of the failure holds on to the whole engine


async def test_two_tensor_parallel_ranks_draw_from_the_same_distribution(folder: Path) -> None:
    before = dict(os.environ)
    # With the extension that real runs have: its layouts say that each rank holds a part.
    engine = await VllmEngine.start(config(folder, tensor_model_parallel_size=2), load_format="auto")
    try:
        layouts = [
            RankLayout.from_bytes(reply["layout"])
            for reply in await engine.collective_rpc("paceline_describe", 60.0)
        ]
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
