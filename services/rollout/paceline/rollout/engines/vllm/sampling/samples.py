"""Translates sample requests into vLLM's, and vLLM's outputs into samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.samples.expert_choices import ChoiceArray
from paceline.core.samples.trajectory import FinishReason
from paceline.rollout.engines.base import Sample, SampleRequest, refused
from paceline.rollout.engines.vllm.images.vision import ImageSender, prompt_with_images
from paceline.rollout.engines.vllm.sampling.log_probs import LogProbs, Versions

SEED: Final = "paceline_seed"
"""Key in `SamplingParams.extra_args` of the seed with which `batched_sampler` draws."""

_ENDS = {reason.value: reason for reason in FinishReason}


async def submit(
    llm: Any, request: SampleRequest, *, images: ImageSender, keeps_log_probs: bool = False
) -> Any:
    """Adds a request to an AsyncLLM; returns the collector of its output.

    Args:
        images: adds requests with images.
        keeps_log_probs: whether the worker draws by the seed itself and keeps the log-probs (see
            `batched_sampler`); otherwise vLLM draws and sends a log-prob with every token.

    Raises:
        InvalidMessageError: vLLM refuses the request.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    # Draws follow from seed and position, wherever the earlier tokens came from.
    token_ids = [*request.prompt_token_ids, *request.drawn]
    seeded: dict[str, Any] = {"seed": request.seed, "logprobs": 0, "flat_logprobs": True}
    if keeps_log_probs:
        seeded = {"extra_args": {SEED: request.seed}}
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens - len(request.drawn),
        stop_token_ids=list(sampling.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **seeded,
    )
    if request.images:
        prompt = prompt_with_images(request, llm.model_config.hf_config)
    else:
        prompt = tokens_input(token_ids, cache_salt=request.cache_salt or None)
    try:
        if request.images:
            return await images.send(llm, request.request_id, prompt, params)
        return await llm.add_request(request.request_id, prompt, params)
    # The first is a subclass of the second in 0.24, but not in 0.32.
    except (VLLMValidationError, ValueError) as error:
        raise refused(request, error) from error


async def to_sample(
    output: Any, request_id: str, kept: LogProbs | None, expert_layers: Sequence[int] = ()
) -> Sample:
    """Converts the only completion of a RequestOutput.

    Args:
        kept: fetches log-probs if the workers keep them.

    Raises:
        PacelineError: the engine has ended the request without a complete sample, or without choices.
    """
    completion = output.outputs[0]
    reason = _ENDS.get(completion.finish_reason)
    if reason is None:
        raise PacelineError(
            f"the engine has ended request {output.request_id} with the finish reason "
            f"{completion.finish_reason!r}; this server's log says why"
        )
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    choices = _choices(completion, expert_layers) if expert_layers else None
    told: Versions = ()
    if kept is not None:
        log_probs, told = await kept.take(request_id, len(output.prompt_token_ids), len(token_ids))
    elif (flat := completion.logprobs) is None:
        log_probs = np.empty(0, np.float32)
    else:
        log_probs = np.asarray(flat.logprobs, dtype=np.float32)
        if len(log_probs) != len(token_ids):
            # Each position lists the drawn token first; further entries would be the most likely tokens.
            log_probs = log_probs[np.asarray(flat.start_indices, dtype=np.int64)]
    return Sample(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=reason,
        versions=tuple((first, version) for first, version in told),
        expert_choices=choices,
    )


def _choices(completion: Any, layers: Sequence[int]) -> ChoiceArray | None:
    """Returns the choices in layers with experts; vLLM returns zeros for the others.

    vLLM keeps them beside keys and values, so cached tokens of a prompt have theirs, too.
    """
    routed = completion.routed_experts
    if routed is None or not len(routed):
        return None
    choices = np.ascontiguousarray(routed[:, list(layers)])
    if empty := np.flatnonzero((choices[..., 0] == choices[..., 1]).all(axis=0)).tolist():
        raise PacelineError(
            f"vLLM returned no choices of experts for layer {layers[empty[0]]}: its kernel chooses by itself "
            "and does not say what; set another rollout.engine_kwargs.moe_backend, such as triton, or leave "
            "out actor.router_replay"
        )
    return choices
