"""The sizes of a model that matter for memory, read from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.images import MODELS_WITH_IMAGES

_WITH_BIAS = ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text")
"""By `model_type`: the projections to queries, keys and values have one"""

_FLOAT32_STATES = 9
"""Tensors of the states' width that the tower's rotary embedding makes in float32"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """The sizes of a Qwen2.5-VL's vision tower. `width`: numbers of a patch; `out`: of an image's token."""

    hidden: int
    intermediate: int
    num_layers: int
    width: int
    merge_size: int
    out: int

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> TowerShape:
        """From the `vision_config` of config.json; what may be left out there is as transformers has it.

        Raises:
            KeyError, TypeError, ValueError: it names its sizes otherwise.
        """
        channels = int(tree.get("in_channels") or tree.get("in_chans") or 3)
        patch_size = int(tree.get("patch_size", 14))
        return cls(
            hidden=int(tree["hidden_size"]),
            intermediate=int(tree["intermediate_size"]),
            num_layers=int(tree["depth"]),
            width=channels * int(tree.get("temporal_patch_size", 2)) * patch_size**2,
            merge_size=int(tree.get("spatial_merge_size", 2)),
            out=int(tree["out_hidden_size"]),
        )

    @property
    def num_parameters(self) -> int:
        """Patch embedding, layers and merger."""
        attention = 4 * self.hidden * (self.hidden + 1)
        mlp = 3 * self.hidden * self.intermediate + 2 * self.intermediate + self.hidden
        merged = self.hidden * self.patches_per_token
        merger = self.hidden + merged * (merged + 1) + (merged + 1) * self.out
        layers = self.num_layers * (attention + mlp + 2 * self.hidden)
        return self.width * self.hidden + layers + merger

    @property
    def patches_per_token(self) -> int:
        """Patches that a token of an image stands for."""
        return self.merge_size**2

    def activations(self, num_patches: int, bytes_per_number: int) -> int:
        """Bytes of the forward pass over so many patches, of which nothing is kept for a backward pass.

        The most of three places: the patch embedding, which copies the pixels; rotary embedding and
        attention; the MLP. The pixels themselves, in float32, stay on the GPU.
        """
        embedding = 4 * self.width * bytes_per_number
        attention = (5 * bytes_per_number + 4 * _FLOAT32_STATES) * self.hidden
        mlp = (3 * self.intermediate + 2 * self.hidden) * bytes_per_number
        return num_patches * (4 * self.width + max(embedding, attention, mlp))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder that matter for memory, and those of the vision tower beside it."""

    hidden: int
    intermediate: int
    num_layers: int
    attention_width: int
    kv_width: int
    vocab: int
    tied: bool
    has_bias: bool
    num_experts: int
    tower: TowerShape | None = None

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ModelShape | None:
        """From config.json; None if it names its sizes otherwise."""
        vision = tree.get("vision_config")
        if vision and tree.get("model_type") not in MODELS_WITH_IMAGES:
            return None
        is_tied = tree.get("tie_word_embeddings")
        tree = tree.get("text_config", tree)
        if tree.get("kv_lora_rank"):  # latent attention has other matrices
            return None
        is_tied = tree.get("tie_word_embeddings", False) if is_tied is None else is_tied
        try:
            hidden, heads = int(tree["hidden_size"]), int(tree["num_attention_heads"])
            head_dim = int(tree.get("head_dim") or hidden // heads)
            num_experts = int(tree.get("num_experts") or tree.get("num_local_experts") or 0)
            intermediate = tree["moe_intermediate_size" if num_experts else "intermediate_size"]
            return cls(
                hidden=hidden,
                intermediate=int(intermediate),
                num_layers=int(tree["num_hidden_layers"]),
                attention_width=heads * head_dim,
                kv_width=int(tree.get("num_key_value_heads") or heads) * head_dim,
                vocab=int(tree["vocab_size"]),
                tied=bool(is_tied),
                has_bias=tree.get("model_type") in _WITH_BIAS,
                num_experts=num_experts,
                tower=TowerShape.of(vision) if vision else None,
            )
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        projections = 2 * self.hidden * (self.attention_width + self.kv_width)
        biases = self.attention_width + 2 * self.kv_width if self.has_bias else 0
        experts = 3 * self.hidden * self.intermediate * max(1, self.num_experts)
        return projections + biases + experts + self.hidden * (2 + self.num_experts)

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head and last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """Those of the decoder, all of which can train."""
        return self.num_layers * self.layer + self.root

    @property
    def num_frozen(self) -> int:
        """Those of the vision tower, which never train."""
        return 0 if self.tower is None else self.tower.num_parameters

    def num_patches(self, num_tokens: int) -> int:
        """The most patches of the images in a prompt of so many tokens."""
        return 0 if self.tower is None else num_tokens * self.tower.patches_per_token

    def num_adapted(self, targets: Sequence[str]) -> int:
        """Numbers of the matrices that `model.lora.targets` name."""
        return self.num_layers * sum(inner * outer for inner, outer in self._matrices(targets))

    def num_adapters(self, targets: Sequence[str], rank: int) -> int:
        """Numbers of their adapters: A and B of each."""
        return self.num_layers * rank * sum(inner + outer for inner, outer in self._matrices(targets))

    def _matrices(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices; those of another name are taken to be an MLP's."""
        hidden, inner = self.hidden, self.intermediate
        attention, kv = self.attention_width, self.kv_width
        known = {
            "q_proj": (hidden, attention),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (attention, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
        fused = {"qkv_proj": (hidden, attention + 2 * kv), "gate_up_proj": (hidden, 2 * inner)}
        if "all" in targets:
            return list(known.values())
        return [(known | fused).get(target, (hidden, inner)) for target in targets]
