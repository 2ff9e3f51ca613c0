"""Each architecture in SGLang: an engine gets a push, and its log-probs are compared with transformers'.

    python -m support.sglang_families [MODEL_TYPE ...]     # prints a line of JSON per architecture

An engine starts without weights, on a GPU in bfloat16 if there is one, else on the CPU in float32. It gets a
tiny model by push, digests are compared, and it draws responses. Their log-probs are compared with those of
transformers in float32, and with the rounding of transformers itself in the engine's data type.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
"""Heads of a size that published models have: SGLang has other rotary kernels for smaller ones."""

CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "exaone4": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window_pattern": "LLG",
    },
    "deepseek_v2": {"q_lora_rank": 64},  # or SGLang's norm reads vectors at addresses that are not aligned
    "deepseek_v3": {"q_lora_rank": 64},
    "glm4_moe_lite": {"q_lora_rank": 64},
    # transformers 5.12, which SGLang pins, does not read rotary_dim.
    "minimax_m2": {
        "rotary_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "olmo": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
}
"""Most as published"""

NUM_PROMPTS, NUM_TOKENS, LONGEST = 12, 24, 32
ALLOWED = 1e-4
"""Mean difference of log-probs beside three times the rounding of transformers"""
UNSURE = 0.3
"""Least mean of the tokens' negative log-probs: with all at 0 every model would seem right"""


def compare(model_type: str) -> dict[str, Any]:
    """Returns how the model is pushed, how far log-probs differ, and `error`, which is "" if all is well."""
    from paceline.core.errors import PacelineError
    from support.vllm_families import export

    began = time.monotonic()
    outcome: dict[str, Any] = {"model_type": model_type}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tensors = export(model_type, folder, SIZES, embedding_std=0.01, **_changes(model_type))
            samples, push, fault = asyncio.run(_drawn(folder / "export", tensors))
        except PacelineError as error:
            return outcome | {"error": str(error).splitlines()[0]}
        engine, rounding = _differences(folder / "export", samples, push["dtype"])
    outcome |= push | {
        "mean_difference": _mean(engine),
        "largest_difference": max(engine),
        "rounding": _mean(rounding),
        "seconds": round(time.monotonic() - began, 1),
    }
    surprise = _mean([-float(value) for _, sample in samples for value in sample.log_probs])
    if not fault and surprise < UNSURE:
        fault = f"the model is sure of its tokens ({surprise:.1e} nats on average): nothing was compared"
    if not fault and _mean(engine) > ALLOWED + 3 * _mean(rounding):
        fault = "log-probs differ by more than rounding"
    return outcome | {"error": fault}


def _changes(model_type: str) -> dict[str, Any]:
    """Returns the changes of a tiny model; its window is as long as a sequence, as SGLang's are not exact."""
    from support.architectures import tiny_config

    has_window = hasattr(tiny_config(model_type), "sliding_window")
    window = {"sliding_window": LONGEST + NUM_TOKENS} if has_window else {}
    return window | CHANGES.get(model_type, {})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


async def _drawn(folder: Path, tensors: dict[str, Any]) -> tuple[list[Any], dict[str, Any], str]:
    """Returns prompts with their samples, what is to be said of the push, and its fault."""
    import torch

    from paceline.core.samples.trajectory import SamplingSpec
    from paceline.rollout.engines.base import SampleRequest
    from paceline.rollout.engines.sglang.arguments import has_gpu
    from paceline.rollout.engines.sglang.engine import SglangEngine
    from paceline.weights.digest.agreement import disagreement
    from support.engine_contract import PushingLearner

    dtype = "bfloat16" if has_gpu() else "float32"
    engine = await SglangEngine.start(_config(folder, dtype))
    learner = PushingLearner(_filled(folder, tensors), wire_dtype=dtype)
    try:
        await learner.join(engine)
        sent, received = await learner.push(engine, version=1)
        draws = random.Random(0)
        requests = [
            SampleRequest(
                request_id=str(number),
                prompt_token_ids=[draws.randrange(3, 190) for _ in range(draws.randint(1, LONGEST))],
                sampling=SamplingSpec(temperature=1.0, max_tokens=NUM_TOKENS),
                seed=number,
            )
            for number in range(NUM_PROMPTS)
        ]
        samples = await engine.generate(requests)
        layouts = await engine.describe()
    finally:
        learner.close()
        await engine.shutdown()
        torch.accelerator.empty_cache() if torch.accelerator.is_available() else None
    push = {"push": "general" if layouts[0].full_tensors else "direct", "dtype": dtype}
    fault = disagreement(sent.reports[0], received.reports)
    rows = [(request.prompt_token_ids, sample) for request, sample in zip(requests, samples, strict=True)]
    return rows, push, "" if fault is None else str(fault)


def _config(folder: Path, dtype: str) -> Any:
    from paceline.config.load import parse
    from paceline.config.run import RunConfig

    return parse(
        RunConfig,
        {
            "data": {
                "train_files": "x.parquet",
                "max_prompt_length": LONGEST,
                "max_response_length": NUM_TOKENS,
            },
            "model": {"path": str(folder), "dtype": dtype},
            "rollout": {"name": "sglang", "max_num_seqs": 16, "gpu_memory_utilization": 0.04},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


def _filled(folder: Path, tensors: dict[str, Any]) -> Any:
    """The learner's model, with these tensors."""
    import torch

    from paceline.learner.model.loading import empty_lm, read_config

    lm = empty_lm(read_config(folder)).to_empty(device="cpu")
    lm.tie_weights()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.copy_(tensors[name])
    return lm


def _differences(folder: Path, rows: list[Any], dtype: str) -> tuple[list[float], list[float]]:
    """Returns the distances of the samples' log-probs to transformers', and of transformers' to float32."""
    import torch

    from paceline.learner.model.architectures import model_class
    from paceline.learner.model.loading import read_config

    kind = model_class(read_config(folder))
    # "sdpa" would leave out Gemma 2's softcap.
    exact, rounded = (
        kind.from_pretrained(folder, dtype=each, attn_implementation="eager").eval()
        for each in (torch.float32, getattr(torch, dtype))
    )
    if dtype == "bfloat16":
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter.copy_(parameter.bfloat16())
    to_samples, to_exact = [], []
    for prompt, sample in rows:
        ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
        theirs, own = (_log_probs(model, ids)[len(prompt) - 1 :] for model in (exact, rounded))
        drawn = torch.from_numpy(sample.log_probs)
        to_samples += (drawn - theirs).abs().tolist()
        to_exact += (own - theirs).abs().tolist()
    return to_samples, to_exact


def _log_probs(model: Any, ids: Any) -> Any:
    """The log-probs (T - 1,) of a row's tokens (1, T) after the first."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)


def main(kinds: list[str]) -> int:
    """Prints a line of JSON per architecture; returns how many are wrong or refused."""
    from paceline.models.facts import ARCHITECTURES

    num_wrong = 0
    for kind in kinds or ARCHITECTURES:
        outcome = compare(kind)
        num_wrong += bool(outcome["error"])
        print(json.dumps(outcome), flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
