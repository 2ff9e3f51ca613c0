"""Tiny models for weight pushes: the same seed gives the same weights in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def tiny_config(*, kv_heads: int, tied: bool) -> Any:
    """Four heads, two layers, a vocabulary of a prime number of tokens (uneven shards, padding)."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=199,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        # Wide enough that the best token is far ahead of the second.
        initializer_range=0.15,
    )


def tiny_moe_config() -> Any:
    """Two layers of four experts."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=199,
        hidden_size=128,
        intermediate_size=160,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )


def seeded_model(config: Any, seed: int) -> Any:
    """A float32 model; biases and norms are random too, so that a misplaced one shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """Gives every vector parameter random values around its own."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.ndim == 1:
            param += 0.1 * torch.randn(param.shape, generator=generator)


def save_config(config: Any, folder: Path) -> None:
    """A model folder that holds the configuration only."""
    config.architectures = ["Qwen3MoeForCausalLM" if config.model_type == "qwen3_moe" else "Qwen2ForCausalLM"]
    config.save_pretrained(folder)


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy continuation by full forwards, with the log-prob of each token."""
    ids, log_probs = list(prompt), []
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids])).logits[0, -1]
        token = int(logits.argmax())
        log_probs.append(float(torch.log_softmax(logits.float(), dim=-1)[token]))
        ids.append(token)
    return ids[len(prompt) :], log_probs
