"""The sizes of a model that matter for memory, read from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder that matter for memory."""

    hidden: int
    intermediate: int
    num_layers: int
    attention_width: int
    kv_width: int
    vocab: int
    tied: bool
    has_bias: bool
    num_experts: int

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ModelShape | None:
        """From config.json; None if it names its sizes otherwise."""
        if tree.get("vision_config"):  # a tower beside the decoder
            return None
        tree = tree.get("text_config", tree)
        if tree.get("kv_lora_rank"):  # latent attention has other matrices
            return None
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
                tied=bool(tree.get("tie_word_embeddings", False)),
                has_bias=tree.get("model_type") == "qwen2",
                num_experts=num_experts,
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
        """All of them."""
        return self.num_layers * self.layer + self.root

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
