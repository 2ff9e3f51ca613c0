"""A tiny random Qwen2.5-VL or Qwen3-VL with a published one's files: weights, tokenizer, image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.chat_templates import SPECIAL

if TYPE_CHECKING:
    from PIL.Image import Image

VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# A content is text, or a list of parts, of which an image is its placeholder between the two vision tokens.
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PATCH_SIZE = 14
MERGE_SIZE = 2


def tiny_vl_tokenizer() -> Any:
    """Bytes and special tokens: 256 + 17 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL, VISION_START, VISION_END, IMAGE, VIDEO, "<|object_ref_start|>"],
    )
    made.chat_template = TEMPLATE
    return made


ROPE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"mrope_section": [4, 6, 6]},
    "qwen3_vl": {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
ROPE["qwen3_vl_moe"] = ROPE["qwen3_vl"]
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
TOWERS["qwen3_vl_moe"] = TOWERS["qwen3_vl"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


def tiny_vl_config(kind: str = "qwen2_5_vl", **changes: Any) -> Any:
    """A few layers of text and two of vision: heads of a size that vLLM's CPU build takes.

    Qwen2.5-VL's tower has a layer with windows. Qwen3-VL's gives states to two of three decoder layers.
    `changes` replace values of the text's configuration.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    tokenizer = tiny_vl_tokenizer()
    ids = {
        token: tokenizer.convert_tokens_to_ids(token) for token in (VISION_START, VISION_END, IMAGE, VIDEO)
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 2 if kind == "qwen2_5_vl" else 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **ROPE[kind]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        **(EXPERTS if kind == "qwen3_vl_moe" else {}),
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "initializer_range": 0.15,
        **TOWERS[kind],
    }
    config: Any = AutoConfig.for_model(
        kind,
        text_config=text | changes,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
    )
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]]
    return config


def tiny_vl_model(seed: int = 0, kind: str = "qwen2_5_vl", **changes: Any) -> Any:
    """The float32 model in evaluation mode; the same seed gives the same weights in every process."""
    import torch
    from transformers import AutoModelForImageTextToText

    from support.push_models import randomize

    torch.manual_seed(seed)
    config = tiny_vl_config(kind, **changes)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


def save_tiny_vl(
    folder: Path, seed: int = 0, *, kind: str = "qwen2_5_vl", weights: bool = True, **changes: Any
) -> Path:
    """A model folder as published ones are; without `weights` it needs no torch."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        tiny_vl_model(seed, kind, **changes).save_pretrained(folder)
    else:
        tiny_vl_config(kind, **changes).save_pretrained(folder)
    tiny_vl_tokenizer().save_pretrained(folder)
    processor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 4 * (PATCH_SIZE * MERGE_SIZE) ** 2,
        "max_pixels": 16 * (PATCH_SIZE * MERGE_SIZE) ** 2,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def drawn_image(seed: int, width: int = 70, height: int = 56) -> Image:
    """A picture of random coarse squares."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, size=(4, 5, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)
