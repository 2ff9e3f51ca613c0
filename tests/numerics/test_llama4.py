"""Llama 4 over packed rows: chunks and temperatures by the sequence's own positions, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.core.errors import ModelError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow, PackedSequences
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model import self_test
from paceline.learner.model.decoder import attention
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.decoder.llama4 import Temperature
from paceline.learner.model.loading import Precision, check_stored, hugging_face_names, load_policy
from paceline.models.model_shape import ModelShape, layers_with_experts
from support.architectures import tiny_config
from support.padded_sequences import attention_one_by_one, many

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
CHUNK = 8


def rows() -> list[PackedRow]:
    """Prompts that end within a chunk, at its end and beyond, with several responses each."""
    rng = np.random.default_rng(0)
    made = []
    for prompt, responses in ((13, (2, 9, 20)), (16, (1, 10)), (3, (4,)), (7, (1, 2))):
        tokens = rng.integers(0, 96, prompt).astype(np.int32)
        for length in responses:
            row = PackedRow(
                index=len(made),
                prompt_token_ids=tokens,
                response_token_ids=rng.integers(0, 96, length).astype(np.int32),
                response_mask=np.ones(length, np.uint8),
                response_log_probs=np.zeros(length, np.float32),
            )
            made.append(row)
    return made


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("share_prompts", "kept_share"), [(False, 1.0), (True, 0.0)])
def test_log_probs_and_gradients_are_those_of_transformers_a_row_at_a_time(
    share_prompts: bool, kept_share: float, ranks: Ranks, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = tiny_config("llama4_text", attention_chunk_size=CHUNK)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    options = LayerOptions(kept_share=kept_share)
    network = load_policy(tmp_path, ranks, Precision(compute=torch.float32), options=options)
    log_probs = network(pack(rows(), CPU, share_prompts=share_prompts))[0]
    expected = self_test._one_by_one(model, rows())
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, len(expected))
    (log_probs * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in hugging_face_names(network):
        gradient = wanted[name].grad
        bound = 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, atol=bound, rtol=0.0)


def within_chunks(inputs: list[Tensor], packed: PackedSequences, size: int) -> Tensor:
    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return (keys <= queries) & (keys // size == queries // size)

    return attention_one_by_one(inputs, packed, sees)


@pytest.mark.parametrize("size", [1, 7, 16, 40, 64, 100])
def test_a_token_sees_those_before_it_in_its_own_chunk(size: int) -> None:
    lengths, prefixes = many(1, longest=40)
    packed = PackedSequences.of(lengths, CPU, prefixes).followed_by(19)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, int(packed.cu_seqlens[-1]), 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]
    layer: Any = torch.nn.Identity()
    layer.chunk_size = size
    out, _ = attention.packed_attention(layer, *inputs, None, packed=packed)
    torch.testing.assert_close(out, within_chunks(inputs, packed, size))
    cut = packed.in_chunks(size)
    assert (cut is packed) == (packed.num_positions <= size)
    assert cut.max_length <= size
    assert cut.keys is None or cut.keys.max_length <= size
    assert packed.in_chunks(size) is cut


def test_a_query_is_scaled_by_its_position_in_its_own_sequence(ranks: Ranks) -> None:
    packed = PackedSequences.of([5, 3, 3, 4], CPU, [None, 0, 0, None])
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 0, 1, 2, 3]
    queries = torch.ones(15, 2, 4)
    scaled = Temperature(scale=0.5, floor=4).scaled(queries, packed)
    # log(1 + floor((p + 1) / 4)): of nothing up to p = 2, log 2 from p = 3 on, log 3 from p = 7 on.
    factors = [1.0] * 3 + [1.34657359] * 4 + [1.54930614] + [1.34657359] * 2 + [1.54930614]
    assert scaled[:11, 1, 2].tolist() == pytest.approx(factors)
    assert scaled[11:, 0, 0].tolist() == pytest.approx([1.0] * 3 + [1.34657359])
    assert Temperature(scale=0.5, floor=9).scaled(queries, packed) is queries
    half = Temperature(scale=0.5, floor=8).scaled(queries.bfloat16(), packed)
    assert half.dtype == torch.bfloat16
    assert half[7, 0, 0] == torch.tensor(1.34657359).bfloat16()

    layer: Any = torch.nn.Identity()
    layer.temperature = Temperature(scale=0.5, floor=4)
    inputs = torch.randn(3, 1, 2, 15, 4).unbind()
    alone, _ = attention.packed_attention(layer, *inputs, None, packed=packed)
    together, _ = attention.packed_attention(layer, *inputs, None, packed=packed.for_pass(ranks.world))
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"moe_layers": [0, 1]}, r"moe_layers=\[0, 1\]"),
        ({"layer_types": ["chunked_attention"] * 4}, r"layer_types=\['chunked_attention', "),
    ],
)
def test_what_engines_compute_otherwise_is_refused(
    changes: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    tiny_config("llama4_text", **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"llama4_text with {setting}.*engines take it for granted"):
        self_test.check_model(tmp_path, longest=100, trust_architecture=True)


def test_a_model_with_images_is_refused_with_the_way_to_its_text_model(tmp_path: Path) -> None:
    """transformers reads the text model out of it, with equal logits, and writes it."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = tiny_config("llama4_text").to_dict()
    sizes = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Llama4Config(text_config=text, vision_config=vision | sizes | {"image_size": 28})
    torch.manual_seed(0)
    published = Llama4ForConditionalGeneration(config)
    published.save_pretrained(tmp_path / "published")
    with pytest.raises(
        ModelError, match=r"llama4 takes images, too, .* with transformers' AutoModelForCausalLM"
    ):
        self_test.check_model(tmp_path / "published", longest=50, trust_architecture=True)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype="auto")
    model.save_pretrained(tmp_path / "text")
    ids = torch.arange(3, 15)[None]
    assert torch.equal(model.eval()(ids).logits, published.eval()(ids).logits)
    assert self_test.check_model(tmp_path / "text", longest=50, trust_architecture=False).num_layers == 4
    check_stored(tmp_path / "text", needs_head=True)


@pytest.mark.parametrize(("step", "sparse"), [(1, [0, 1, 2, 3]), (2, [1, 3])])
def test_the_small_model_has_the_layers_that_an_engine_counts(step: int, sparse: list[int]) -> None:
    config = tiny_config(
        "llama4_text",
        num_hidden_layers=48,
        interleave_moe_layer_step=step,
        attention_chunk_size=8192,
        floor_scale=8192,
        intermediate_size_mlp=16384,
    )
    assert layers_with_experts(config.to_dict()) == tuple(range(step - 1, 48, step))
    small = self_test.shrink(config)
    assert (small.num_hidden_layers, small.moe_layers, small.no_rope_layers) == (4, sparse, [1, 1, 1, 0])
    assert small.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    # Rows of the test exceed them.
    assert (small.attention_chunk_size, small.floor_scale, small.intermediate_size_mlp) == (32, 8, 128)
    rows = self_test._rows(small)
    assert max(len(row.prompt_token_ids) + len(row.response_token_ids) for row in rows) > 32


def test_the_sizes_are_those_of_the_published_models() -> None:
    """Scout's text model has 108B parameters and 17B active ones, by its model card, Maverick's 400B."""
    from transformers import Llama4TextConfig

    scout, maverick = (
        ModelShape.of(Llama4TextConfig(num_local_experts=count, interleave_moe_layer_step=step).to_dict())
        for count, step in ((16, 1), (128, 2))
    )
    assert scout is not None
    assert maverick is not None
    assert round(scout.num_parameters / 1e9) == 108
    assert round(maverick.num_parameters / 1e9) == 401
    embedding = scout.vocab * scout.hidden
    assert round((scout.active_parameters + embedding) / 1e9) == 17
