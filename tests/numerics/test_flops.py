"""The arithmetic of an update, counted by hand."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.learner.batch.arithmetic import RowLength
from paceline.learner.model.flops import arithmetic_of, peak_flops
from paceline.learner.model.networks import PolicyNetwork


def test_a_layer_a_head_and_the_pairs_that_attention_looks_at() -> None:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=10,
        tie_word_embeddings=False,
    )
    network = PolicyNetwork(LlamaForCausalLM(config))
    # A layer: q and o 8x8, k and v 4x8, three of 8x16, two norms of 8.
    layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
    rows = [
        RowLength(prompt_id=0, num_prompt_tokens=3, num_response_tokens=2),
        RowLength(prompt_id=1, num_prompt_tokens=1, num_response_tokens=4),
    ]
    expected = 6 * (2 * layer) * 10 + 6 * 80 * 6 + 2 * (6 * 8 * 2 * 25)
    assert arithmetic_of(network).of_rows(rows) == expected


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
