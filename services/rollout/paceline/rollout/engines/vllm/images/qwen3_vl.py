"""vLLM's Qwen3-VL without torchvision; see `without_torchvision`."""

from __future__ import annotations

from paceline.rollout.engines.vllm.images.qwen2_5_vl import with_images_alone

# Imported after `qwen2_5_vl`, which replaces a module that cannot be imported.
from vllm.model_executor.models import qwen3_vl, qwen3_vl_moe  # isort: skip

_PROCESSING = qwen3_vl.Qwen3VLMultiModalProcessor, qwen3_vl.Qwen3VLDummyInputsBuilder

Qwen3VL = with_images_alone(
    qwen3_vl.Qwen3VLForConditionalGeneration, qwen3_vl.Qwen3VLProcessingInfo, *_PROCESSING
)
Qwen3VLMoe = with_images_alone(
    qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration, qwen3_vl_moe.Qwen3VLMoeProcessingInfo, *_PROCESSING
)
