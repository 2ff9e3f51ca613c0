"""Tiny Mixture of Experts models as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.weights import corrections
from support.architectures import tiny_config
from support.learner_fakes import VOCAB_SIZE

COMMON_KINDS = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
)
"""Families whose experts every test of experts covers."""


def write_model(folder: Path, kind: str, *, corrections_std: float = 0.3, **changes: Any) -> Any:
    """Writes a model and returns it; the corrections of its routers are drawn with this deviation."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, vocab_size=VOCAB_SIZE, **changes))
    for correction in corrections_of(model).values():
        correction.normal_(std=corrections_std)
    model.save_pretrained(folder)
    return model


def corrections_of(model: Any) -> dict[str, Tensor]:
    """Buffers that a router adds to its scores, as DeepSeek-V3 has them."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(corrections.BUFFER)}
