"""vLLM's Qwen3-VL without torchvision; see `without_torchvision`."""

from __future__ import annotations

from paceline.rollout.engines.vllm.images.qwen2_5_vl import ImagesAlone

# Imported after `qwen2_5_vl`, which replaces a module that cannot be imported.
from vllm.model_executor.models import qwen3_vl, qwen3_vl_moe  # isort: skip
from vllm.multimodal import MULTIMODAL_REGISTRY  # isort: skip


class VlProcessingInfo(ImagesAlone, qwen3_vl.Qwen3VLProcessingInfo):  # type: ignore[misc]
    """Says how many tokens an image may have."""


class VlMoeProcessingInfo(ImagesAlone, qwen3_vl_moe.Qwen3VLMoeProcessingInfo):  # type: ignore[misc]
    """Says how many tokens an image may have."""


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=VlProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3VL(qwen3_vl.Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Extends vLLM's class of this model."""


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=VlMoeProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3VLMoe(qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """Extends vLLM's class of this model."""
