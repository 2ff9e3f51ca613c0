"""Encodes prompts and samples as JSON for a script that controls a run (`paceline.api.session`)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.errors import ProtocolError
from paceline.core.samples.trajectory import RewardContext, ScoredHeader
from paceline.data.prompts import Prompt
from paceline.data.samples import ScoredSample, ScoredSamples
from paceline.wire import decode_scored, encode_scored_header

SOCKET = "PACELINE_SCRIPT"
"""Environment variable with the script's socket for the controller."""

FLOW = "paceline.controller.run.dataflow.script:flow"
"""The dataflow that a script controls."""


def plain_prompt(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt as plain JSON data, without images."""
    context = prompt.context
    return {
        "id": prompt.prompt_id,
        "token_ids": prompt.token_ids.tolist(),
        "messages": [dict(message) for message in prompt.messages],
        "ground_truth": context.ground_truth,
        "data_source": context.data_source,
        "prompt_text": context.prompt_text,
        "extra": dict(context.extra),
    }


def prompt_of(plain: Mapping[str, Any]) -> Prompt:
    """Returns the prompt that `plain_prompt` described."""
    return Prompt(
        prompt_id=plain["id"],
        token_ids=np.asarray(plain["token_ids"], dtype=np.int32),
        messages=tuple(plain["messages"]),
        context=RewardContext(
            ground_truth=plain["ground_truth"],
            data_source=plain["data_source"],
            prompt_text=plain["prompt_text"],
            extra=plain["extra"],
        ),
    )


def plain_samples(samples: ScoredSamples) -> dict[str, Any]:
    """Returns the samples of a sampling, with their prompts' ids."""
    return {
        "samples": [_plain(sample) for sample in samples],
        "beside": {name: [_plain(sample) for sample in others] for name, others in samples.beside.items()},
    }


def samples_of(plain: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> ScoredSamples:
    """Returns the samples that `plain_samples` described."""
    return ScoredSamples(
        [_sample(sample, prompts) for sample in plain["samples"]],
        {name: [_sample(sample, prompts) for sample in others] for name, others in plain["beside"].items()},
    )


def _plain(sample: ScoredSample) -> dict[str, Any]:
    header = base64.b64encode(encode_scored_header(sample.header)).decode()
    return {"header": header, "reward": sample.reward, "text": sample.text}


def _sample(plain: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> ScoredSample:
    header = decode_scored(base64.b64decode(plain["header"]))
    if not isinstance(header, ScoredHeader):
        raise ProtocolError("a sample without a score")
    prompt = prompts[header.trajectory_id.prompt_id]
    return ScoredSample(prompt=prompt, header=header, reward=plain["reward"], text=plain["text"])
