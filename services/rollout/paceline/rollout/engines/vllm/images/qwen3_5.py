"""vLLM's Qwen 3.5 without torchvision; see `without_torchvision`."""

from __future__ import annotations

from paceline.rollout.engines.vllm.images.qwen2_5_vl import ImagesAlone

# Imported after `qwen2_5_vl`, which replaces a module that cannot be imported.
from vllm.model_executor.models import qwen3_5, qwen3_vl  # isort: skip
from vllm.multimodal import MULTIMODAL_REGISTRY  # isort: skip

Text = qwen3_5.Qwen3_5ForCausalLM
MoeText = qwen3_5.Qwen3_5MoeForCausalLM


class DenseProcessingInfo(ImagesAlone, qwen3_5.Qwen3_5ProcessingInfo):  # type: ignore[misc]
    """Says how many tokens an image may have."""


class MoeProcessingInfo(ImagesAlone, qwen3_5.Qwen3_5MoeProcessingInfo):  # type: ignore[misc]
    """Says how many tokens an image may have."""


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=DenseProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen35(qwen3_5.Qwen3_5ForConditionalGeneration):  # type: ignore[misc]
    """Extends vLLM's class of this model."""


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=MoeProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen35Moe(qwen3_5.Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """Extends vLLM's class of this model."""
