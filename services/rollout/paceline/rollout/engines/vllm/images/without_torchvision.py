"""Makes vLLM build Qwen2.5-VL, Qwen3-VL and Qwen 3.5 without torchvision.

The index has torchvision only for CUDA, which breaks the build for the CPU. vLLM needs it for two things that
are not needed here: videos, and the processing of images, which are processed already.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

_HERE: Final = "paceline.rollout.engines.vllm.images"
MODELS: Final[Mapping[str, str]] = {
    "Qwen2_5_VLForConditionalGeneration": f"{_HERE}.qwen2_5_vl:Qwen25VL",
    "Qwen3VLForConditionalGeneration": f"{_HERE}.qwen3_vl:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": f"{_HERE}.qwen3_vl:Qwen3VLMoe",
    "Qwen3_5ForCausalLM": f"{_HERE}.qwen3_5:Text",
    "Qwen3_5ForConditionalGeneration": f"{_HERE}.qwen3_5:Qwen35",
    "Qwen3_5MoeForCausalLM": f"{_HERE}.qwen3_5:MoeText",
    "Qwen3_5MoeForConditionalGeneration": f"{_HERE}.qwen3_5:Qwen35Moe",
}
"""Paceline's classes, by the names of vLLM's classes."""


def register() -> None:
    """Registers Paceline's classes in this process, unless torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture, place in MODELS.items():
        if _HERE not in str(ModelRegistry.models.get(architecture)):
            ModelRegistry.register_model(architecture, place)
