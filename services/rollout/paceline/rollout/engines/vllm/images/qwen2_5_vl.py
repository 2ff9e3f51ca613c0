"""vLLM's Qwen2.5-VL with an image processor that needs no torchvision; see `without_torchvision`."""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoImageProcessor
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

# vLLM imports a function from a module of transformers that needs torchvision; the module for Pillow has the
# same function.
sys.modules.setdefault(
    "transformers.models.qwen2_vl.image_processing_qwen2_vl", image_processing_pil_qwen2_vl
)

from vllm.model_executor.models import qwen2_5_vl  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402


class ImagesAlone:
    """Says how many tokens an image may have; processes nothing, and refuses videos."""

    ctx: Any

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """Allows as many images as a prompt has room for."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
        """Returns the tokens of the image processor's largest image, at most the length of a sequence."""
        processor = AutoImageProcessor.from_pretrained(
            self.ctx.model_config.model, backend="pil", local_files_only=True
        )
        token_pixels = (processor.patch_size * processor.merge_size) ** 2
        return {"image": min(seq_len, processor.size["longest_edge"] // token_pixels)}


def with_images_alone(model: type, info: type, processor: type, dummy_inputs: type) -> type:
    """Returns a subclass of vLLM's class of a model, registered with `ImagesAlone`.

    Args:
        info: vLLM's class that describes the processing.
    """
    own_info = type(info.__name__, (ImagesAlone, info), {})
    register = MULTIMODAL_REGISTRY.register_processor(processor, info=own_info, dummy_inputs=dummy_inputs)
    registered: type = register(type(model.__name__, (model,), {"__module__": __name__}))
    return registered


Qwen25VL = with_images_alone(
    qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
    qwen2_5_vl.Qwen2_5_VLProcessingInfo,
    qwen2_5_vl.Qwen2_5_VLMultiModalProcessor,
    qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
