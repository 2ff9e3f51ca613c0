"""Draws on a GPU: the kernels give what plain torch gives, and both of vLLM's model runners draw the same."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.rollout.engines.sampling.draw import draw, uniforms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 9


def drawn(
    logits: torch.Tensor, temperatures: list[float], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their log-probabilities, and the numbers that they were drawn by."""
    from paceline.rollout.engines.sampling.draw_kernels import draw_into

    batch = len(logits)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(batch + 3, generator=generator)[:batch].cuda()
    positions = torch.randint(LENGTH, (batch,), generator=generator, dtype=torch.int32).cuda()
    numbers = uniforms(torch.arange(batch + 3, device="cuda"), LENGTH)
    table = torch.full((batch + 3, LENGTH), torch.nan, device="cuda")
    tokens = draw_into(
        logits,
        positions,
        table_rows=rows,
        divisors=torch.tensor([value or 1.0 for value in temperatures], device="cuda"),
        is_greedy=torch.tensor([not value for value in temperatures], dtype=torch.uint8, device="cuda"),
        numbers=numbers,
        log_probs=table,
        dtype=torch.int64,
    )
    log_probs = table[rows, positions.long()]
    table[rows, positions.long()] = torch.nan
    assert table.isnan().all(), "other places were written, too"
    return tokens.squeeze(-1), log_probs, numbers[rows, positions.long()]


@pytest.mark.parametrize("vocab", [3, 1024, 49_152, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_log_probs_are_those_of_plain_torch(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(vocab)
    logits = (4 * torch.randn(300, vocab, generator=generator, device="cuda")).to(dtype)
    temperatures = [(1.0, 0.7, 0.0)[row % 3] for row in range(300)]
    tokens, log_probs, numbers = drawn(logits, temperatures)
    scaled = logits.double() / torch.tensor([[value or 1.0] for value in temperatures], device="cuda")
    true = scaled.log_softmax(-1)
    expected = draw(true, numbers)
    greedy = torch.tensor([not value for value in temperatures], device="cuda")
    assert torch.equal(scaled.gather(-1, tokens.unsqueeze(-1))[greedy, 0], scaled[greedy].amax(-1))
    # A number within a rounding of an end may fall on its other side.
    assert int((tokens != expected)[~greedy].sum()) <= 1
    at_tokens = true.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs.double(), at_tokens, rtol=0, atol=1e-5)


def test_a_row_draws_the_same_bits_whatever_is_beside_it() -> None:
    logits = 3 * torch.randn(64, 50_257, device="cuda")
    tokens, log_probs, _ = drawn(logits, [1.0] * 64)
    noise = torch.cat([logits, torch.randn(200, 50_257, device="cuda")])[:64]
    again, log_probs_again, _ = drawn(noise, [1.0] * 64)
    assert torch.equal(tokens, again)
    assert torch.equal(log_probs, log_probs_again)


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    logits = torch.full((512, 3000), -torch.inf, device="cuda")
    logits[:, [5, 1023, 1024, 2999]] = 0.0
    tokens, log_probs, _ = drawn(logits, [1.0] * 512)
    assert set(tokens.tolist()) == {5, 1023, 1024, 2999}
    assert log_probs.tolist() == pytest.approx([math.log(0.25)] * 512)


def test_a_logit_that_is_no_number_makes_a_log_prob_that_is_none() -> None:
    logits = torch.randn(2, 3000, device="cuda")
    logits[0, 1500] = torch.nan
    tokens, log_probs, _ = drawn(logits, [1.0, 1.0])
    assert 0 <= int(tokens[0]) < 3000
    assert log_probs.isnan().tolist() == [True, False]


SAMPLES = """
import asyncio, json, random, sys
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.samples.trajectory import SamplingSpec
from paceline.rollout.engines.base import SampleRequest
from paceline.rollout.engines.vllm.engine import VllmEngine

async def main():
    config = parse(RunConfig, {
        "data": {"train_files": "unused.parquet", "max_prompt_length": 32, "max_response_length": 64},
        "model": {"path": sys.argv[1], "dtype": "float32"},
        "rollout": {"sampler": "batched", "max_num_seqs": 8, "gpu_memory_utilization": 0.05,
                    "enforce_eager": True, "engine_kwargs": {"kv_cache_memory_bytes": int(sys.argv[2])}},
        "reward": {"functions": [{"name": "exact_match"}]}, "trainer": {"total_steps": 1}})
    engine = await VllmEngine.start(config)
    rng = random.Random(0)
    requests = [
        SampleRequest(request_id=str(i), prompt_token_ids=[rng.randrange(3, 900) for _ in range(8 + i % 20)],
                      sampling=SamplingSpec(temperature=(1.0, 0.7, 0.0)[i % 3], max_tokens=24 + i % 40),
                      seed=1000 + i, cache_salt="v0")
        for i in range(40)]
    samples = await engine.generate(requests)
    print(json.dumps([[s.token_ids.tolist(), s.log_probs.tolist()] for s in samples]))
    await engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""
ROOMY, TIGHT = 64 * 2**20, 3 * 2**20
"""Bytes of KV cache: for all requests, and for so few that some give way to others."""


@pytest.mark.vllm
def test_both_model_runners_draw_the_same_samples(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "samples.py").write_text(SAMPLES)
    outcomes = []
    for runner, cache in (("0", ROOMY), ("1", ROOMY), ("1", TIGHT)):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "samples.py"), str(tmp_path), str(cache)],
            env=os.environ | {"VLLM_USE_V2_MODEL_RUNNER": runner},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        outcomes.append(json.loads(done.stdout.splitlines()[-1]))
    first, second, preempted = outcomes
    for other in (second, preempted):
        assert [tokens for tokens, _ in other] == [tokens for tokens, _ in first]
        for (_, expected), (_, log_probs) in zip(first, other, strict=True):
            assert log_probs == pytest.approx(expected, abs=1e-4)
