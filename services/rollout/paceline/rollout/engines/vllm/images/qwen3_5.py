"""vLLM's Qwen 3.5 without torchvision; see `without_torchvision`."""

from __future__ import annotations

from paceline.rollout.engines.vllm.images.qwen2_5_vl import with_images_alone

# Imported after `qwen2_5_vl`, which replaces a module that cannot be imported.
from vllm.model_executor.models import qwen3_5, qwen3_vl  # isort: skip

_PROCESSING = qwen3_vl.Qwen3VLMultiModalProcessor, qwen3_vl.Qwen3VLDummyInputsBuilder

Text = qwen3_5.Qwen3_5ForCausalLM
MoeText = qwen3_5.Qwen3_5MoeForCausalLM
Qwen35 = with_images_alone(
    qwen3_5.Qwen3_5ForConditionalGeneration, qwen3_5.Qwen3_5ProcessingInfo, *_PROCESSING
)
Qwen35Moe = with_images_alone(
    qwen3_5.Qwen3_5MoeForConditionalGeneration, qwen3_5.Qwen3_5MoeProcessingInfo, *_PROCESSING
)
