"""Full tensors loaded again and again into a running engine, as pushes by the general path do.

    python -m support.vllm_reloaded MODEL_TYPE     # prints a line of JSON

A tiny model of the kind is exported. An engine starts in this process without its weights, gets the tensors
of three models one after the other, and scores a row after each. Prints the largest difference to
transformers' log-probs before any load, and after each. Before the last load all parameters are overwritten.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_LOADS = 3


def differences(model_type: str) -> list[float]:
    """Before the first load, and after each."""
    import torch
    from transformers import AutoModelForCausalLM

    from support.vllm_families import export

    folder = Path(tempfile.mkdtemp())
    export(model_type, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    row = torch.randint(3, 190, (1, 12), generator=torch.Generator().manual_seed(0))
    engine = tiny_engine(folder / "export")
    worker = engine.llm_engine.model_executor.driver_worker.worker
    engine_model = worker.get_model()
    receiver = worker._paceline_receiver()
    errors = [_difference(engine, model, row)]
    for number in range(NUM_LOADS):
        draws = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for value in _weights(model).values():
                value.add_(0.05 * torch.randn(value.shape, generator=draws))
            if number == NUM_LOADS - 1:
                for parameter in engine_model.parameters():  # as sleep at level 2 loses them
                    parameter.fill_(float("nan"))
        receiver._load_full(iter(_learners_tensors(model)))
        errors.append(_difference(engine, model, row))
    return errors


def _weights(model: Any) -> dict[str, Any]:
    """What a checkpoint has: parameters, and the corrections of routers' scores."""
    from paceline.weights.corrections import BUFFER

    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(BUFFER)}
    return {**dict(model.named_parameters()), **buffers}


def _learners_tensors(model: Any) -> list[tuple[str, Any]]:
    """Full tensors as a push brings them."""
    from paceline.weights.corrections import BUFFER, PARTS, split

    return [
        (name.removesuffix(BUFFER) + PARTS, split(value))
        if name.endswith(BUFFER)
        else (name, value.detach().clone())
        for name, value in _weights(model).items()
    ]


def tiny_engine(folder: Path, load_format: str = "dummy") -> Any:
    """vLLM in this process, in float32, for a tiny model."""
    from vllm import LLM

    from paceline.rollout.engines.vllm.start.arguments import (
        WORKER_EXTENSION,
        config_overrides,
        latent_attention_on_cpu,
        llama4_attention,
    )

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format=load_format,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        worker_extension_cls=WORKER_EXTENSION,
        hf_overrides=config_overrides(folder),
        **latent_attention_on_cpu(folder),
        **llama4_attention(folder, on_cpu=True),
    )


def _difference(engine: Any, model: Any, row: Any) -> float:
    import torch
    from vllm import SamplingParams

    with torch.no_grad():
        scores = torch.log_softmax(model(row).logits.float(), -1)
    expected = scores[0, :-1].gather(-1, row[0, 1:, None])[:, 0]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": row[0].tolist()}], sampling, use_tqdm=False)
    tokens = row[0, 1:].tolist()
    own = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens, strict=True)]
    return float((torch.tensor(own) - expected).abs().max())


def main(model_type: str) -> None:
    """Prints the differences."""
    from paceline.rollout.engines.vllm.start import environment

    os.environ.update(environment.in_this_process())
    environment.prepare_cpu()
    print(json.dumps(differences(model_type)))


if __name__ == "__main__":
    main(sys.argv[1])
