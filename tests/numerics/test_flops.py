"""The arithmetic of an update, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForImageTextToText,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
)

from paceline.config.model import LoraConfig
from paceline.core.policy import TrainedVision
from paceline.learner.batch.planning.arithmetic import Arithmetic, RowLength
from paceline.learner.model.decoder.experts import active_parameters
from paceline.learner.model.flops import arithmetic_of, peak_flops
from paceline.learner.model.image_states import train_tower
from paceline.learner.model.loading import empty_lm
from paceline.learner.model.lora import add_adapters, is_adapter
from paceline.learner.model.networks import PolicyNetwork
from support.architectures import tiny_config


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


def test_pairs_in_latent_attention_count_the_sizes_of_its_heads() -> None:
    with torch.device("meta"):
        lm = DeepseekV2ForCausalLM(tiny_config("deepseek_v2"))
    # Four heads of 8 + 4 for queries and keys and 6 for values, in three layers; half the pairs are left out.
    assert arithmetic_of(PolicyNetwork(lm)).per_pair == 6 * 4 * (12 + 6) * 3 // 2


def test_biases_of_experts_count_as_their_weights_do() -> None:
    lm = empty_lm(tiny_config("gpt_oss"))
    sizes = {name: parameter.numel() for name, parameter in lm.model.layers.named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    used = active_parameters(lm.model.layers, lm.config, trained=True)
    assert used == sum(sizes.values()) - of_experts // 2  # a token meets two of four


def test_pairs_are_counted_by_layer_where_heads_differ() -> None:
    lm = empty_lm(tiny_config("gemma4_text"))
    # Four heads, of 8 in three layers and of 16 in two; keys as wide as values.
    assert arithmetic_of(PolicyNetwork(lm)).per_pair == 3 * 4 * 2 * (3 * 8 + 2 * 16)


def test_of_a_mixtures_experts_those_count_that_a_token_meets() -> None:
    config = tiny_config("qwen3_moe")
    with torch.device("meta"):
        lm = Qwen3MoeForCausalLM(config)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
    every = sum(parameter.numel() for parameter in lm.model.layers.parameters())
    assert config.num_experts > config.num_experts_per_tok
    assert arithmetic_of(PolicyNetwork(lm)).per_token == 6 * (every - idle)


@pytest.mark.parametrize("targets", [None, ("all",), ("q_proj", "down_proj")])
def test_frozen_matrices_count_four_operations_by_torchs_own_count(targets: tuple[str, ...] | None) -> None:
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    lm = LlamaForCausalLM(config)
    if targets is not None:
        add_adapters(lm, lm.model.layers, LoraConfig(rank=4, targets=targets))
    num_tokens = 14
    with FlopCounterMode(display=False) as counter:
        lm.model(input_ids=torch.arange(num_tokens)[None]).last_hidden_state.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    # Attention's are bmm.
    merged = (torch.ops.paceline.merged_linear, torch.ops.paceline.merged_linear_backward)
    products = sum(counts.get(operator, 0) for operator in (torch.ops.aten.mm, *merged))
    layers = dict(lm.model.layers.named_parameters())
    norms = sum((6 if targets is None else 4) * p.numel() for p in layers.values() if p.ndim == 1)
    # Nothing trains below the first projections, so nothing needs the gradients of their inputs.
    first = [
        p
        for name, p in layers.items()
        if name.startswith("0.self_attn.") and "o_proj" not in name and not is_adapter(name)
    ]
    spared = 0 if targets is None else 2 * sum(p.numel() for p in first)
    arithmetic = arithmetic_of(PolicyNetwork(lm))
    assert products == num_tokens * (arithmetic.per_token - norms - spared)
    assert arithmetic.per_response_token == (6 if targets is None else 4) * 24 * 48


@pytest.mark.parametrize("part", ["none", "projector", "all"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_vision_tower_counts_its_passes_by_torchs_own_count(kind: str, part: TrainedVision) -> None:
    lm = AutoModelForImageTextToText.from_config(tiny_config(kind), attn_implementation="eager")
    train_tower(lm.model, part)
    tower = lm.model.visual
    config = tower.config
    assert getattr(config, "window_size", 16) // config.patch_size == 4
    height, width = 8, 12  # whole windows of 4 x 4 patches
    pixels = torch.randn(height * width, 3 * 2 * config.patch_size**2)
    with FlopCounterMode(display=False) as counter:
        output = tower(pixels, grid_thw=torch.tensor([[1, height, width]]))
        states = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        if part != "none":
            torch.autograd.backward([state.sum() for state in states])
    merger, rest = 0.0, 0.0  # what torch does not count: norms and biases are no products
    for name, parameter in tower.named_parameters():
        passes = 3 if parameter.requires_grad else 1
        is_merger = name.startswith(("merger.", "deepstack_merger_list."))
        # Pixels need no gradient.
        is_spared = passes == 3 and name == "patch_embed.proj.weight"
        number = parameter.numel() * (passes if parameter.ndim == 1 else is_spared)
        merger += number * is_merger
        rest += number * (not is_merger)
    arithmetic = arithmetic_of(PolicyNetwork(lm))
    row = RowLength(prompt_id=0, num_prompt_tokens=0, num_response_tokens=0, num_patches=height * width)
    added = height * width * 2 * (rest + merger / 4)
    assert arithmetic.of_images(row) == pytest.approx(counter.get_total_flops() + added, abs=height * width)


def test_images_of_a_prompt_count_once() -> None:
    arithmetic = Arithmetic(per_token=0, per_response_token=0, per_pair=0, per_patch=10, per_patch_pair=1)
    rows = [
        RowLength(prompt_id=prompt, num_prompt_tokens=9, num_response_tokens=2, num_patches=patches)
        for prompt, patches in ((0, 4), (0, 4), (1, 8), (2, 0))
    ]
    once = 10 * (4 + 8) + 4**2 + 8**2
    assert arithmetic.of_rows(rows) == arithmetic.of_rows(rows, share_prompts=True) == once
    assert arithmetic.of_rows(rows[:1]) == 10 * 4 + 4**2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", None),
    ],
)
def test_a_gpus_peak_is_known_by_its_whole_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
