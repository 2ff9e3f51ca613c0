"""Has vLLM build Qwen2.5-VL where torchvision is not installed.

The packages of torchvision on the index are built for CUDA and break the build for the CPU. vLLM needs it for
two things that are not needed here: the processing of images, which come processed already, and videos.
"""

from __future__ import annotations

import importlib.util
from typing import Final

ARCHITECTURE: Final = "Qwen2_5_VLForConditionalGeneration"
_MODEL: Final = "paceline.rollout.engines.vllm.images.qwen2_5_vl:Qwen25VL"


def register() -> None:
    """Registers `qwen2_5_vl` for the model in this process; does nothing where torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm.model_executor.models.registry import ModelRegistry

    if _MODEL.partition(":")[0] not in str(ModelRegistry.models.get(ARCHITECTURE)):
        ModelRegistry.register_model(ARCHITECTURE, _MODEL)
