"""The self-test of a model, for each architecture of the table and for those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.core.errors import ConfigError, ModelError
from paceline.learner.batch.pack import pack
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model import self_test
from paceline.learner.model.architectures import logit_scale, require_compilable, require_shared_tokens
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.folder import gathered_tensors, write_folder
from paceline.learner.model.image_states import EmbeddedTokens
from paceline.learner.model.loading import Precision, hugging_face_names, load_policy
from paceline.learner.model.self_test import check_model
from paceline.models.facts import ARCHITECTURES
from paceline.rollout.engines.scored_rows import read_rows
from paceline.weights.corrections import FACTOR
from support.architectures import documented_pushes, table, tiny_config
from support.source import ROOT

pytestmark = pytest.mark.torch


def check(folder: Path, config: Any, *, longest: int = 100, trust: bool = False) -> self_test.SelfTest:
    config.save_pretrained(folder)
    return check_model(folder, longest=longest, trust_architecture=trust)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_architecture_of_the_table_passes(model_type: str, tmp_path: Path) -> None:
    outcome = check(tmp_path, tiny_config(model_type), longest=8 if model_type == "cohere2" else 100)
    assert outcome.largest_error < 5e-5
    assert 2 <= outcome.num_layers <= 4


def test_a_model_that_takes_images_is_tested_with_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    tiny_config("qwen2_5_vl").save_pretrained(tmp_path)
    outcome = check_model(tmp_path, longest=100, trust_architecture=False, keep=kept)
    assert "those of each sequence alone, in prompts with images, too (largest difference" in str(outcome)
    rows = json.loads((kept / "scored_rows.json").read_text(encoding="utf-8"))
    assert [len(row["prompt"]) for row in rows] == [3, 9, 5, 5, 14]
    assert "images" not in str(check(tmp_path, tiny_config("qwen2")))

    read = read_rows(kept)
    assert [len(row.images) for row in read] == [0, 1, 0, 0, 2]
    assert [image.pixels.shape for image in read[4].images] == [(8, 96), (36, 96)]
    assert [image.image.grid for image in read[4].images] == [(1, 4, 2), (1, 6, 6)]

    monkeypatch.setattr(
        "paceline.learner.batch.pack.prompt_positions",
        lambda num_tokens, images: np.broadcast_to(np.arange(num_tokens), (3, num_tokens)),
    )
    with pytest.raises(ModelError, match=r"differ from those of each sequence alone by up to [0-9.]+ nats"):
        check(tmp_path, tiny_config("qwen2_5_vl"))


def test_states_for_decoder_layers_that_do_not_arrive_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each layer: the small model has one above the last that gets any."""
    plain = EmbeddedTokens.part
    for missing in (0, 1):

        def part(tokens: EmbeddedTokens, start: int, length: int, missing: int = missing) -> dict[str, Any]:
            inputs = plain(tokens, start, length)
            inputs["deepstack_visual_embeds"][missing] *= 0
            return inputs

        monkeypatch.setattr(EmbeddedTokens, "part", part)
        with pytest.raises(ModelError, match=r"those of each sequence alone by up to [0-9.]+ nats"):
            check(tmp_path, tiny_config("qwen3_vl"))


def test_rows_beyond_a_window_that_vllm_counts_otherwise_are_refused(tmp_path: Path) -> None:
    config = tiny_config("cohere2", sliding_window=20)
    with pytest.raises(ModelError, match=r"a window of 20 tokens, which engines count.*, now 21, to 20"):
        check(tmp_path, config, longest=21)
    assert self_test.shrink(config).sliding_window == 20  # so the engine is compared within it, too
    assert self_test.shrink(tiny_config("mistral", sliding_window=20)).sliding_window == 8


@pytest.mark.parametrize(("model_type", "scale"), [("granite", 0.25), ("hyperclovax", 4.0)])
def test_a_scaling_of_logits_divides_them_unless_the_family_multiplies(model_type: str, scale: float) -> None:
    config = PretrainedConfig(logits_scaling=4.0)
    config.model_type = model_type
    assert logit_scale(config) == scale


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("lfm2", r"recurrent or convolution layers \(Lfm2ShortConv\)"),
        ("mamba2", r"recurrent or convolution layers \(Mamba2Mixer\)"),
        ("falcon_h1", r"recurrent or convolution layers \(FalconH1Mixer\)"),
    ],
)
@pytest.mark.parametrize("trust", [False, True])
def test_layers_that_ignore_where_sequences_begin_are_refused_by_name(
    model_type: str, reason: str, trust: bool, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, tiny_config(model_type), trust=trust)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("stablelm", "StableLmAttention's model does not tell its layers where sequences begin"),
        ("falcon", "'falcon' is no causal language model with exchangeable attention"),
    ],
)
def test_attention_that_cannot_be_exchanged_is_refused_with_a_sentence(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, tiny_config(model_type), trust=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("persimmon", "PersimmonForCausalLM"),
        ("flex_olmo", "FlexOlmoForCausalLM"),
    ],
)
def test_an_architecture_outside_the_table_needs_trust_and_the_self_test(
    kind: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="set model.trust_architecture: true"):
        check(tmp_path, tiny_config(kind))
    assert check(tmp_path, tiny_config(kind), trust=True).architecture == name


def test_a_model_whose_numbers_are_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of Cohere's logits, forgotten: what was wrong in silence."""
    monkeypatch.setattr("paceline.learner.model.networks.logit_scale", lambda config: 1.0)
    with pytest.raises(ModelError, match=r"differ from those of each sequence alone by up to [1-9.]+ nats"):
        check(tmp_path, tiny_config("cohere"))


def test_a_model_that_draws_random_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.learner.model.architectures.without_dropout", lambda config: config)
    with pytest.raises(ModelError, match="two forward passes over the same tokens differ"):
        check(tmp_path, tiny_config("phi3", attention_dropout=0.0))


@pytest.mark.parametrize(
    ("added", "apart"),
    [((0.0, 7e-5), 7e-5), ((0.0, 3e-4, 0.0), 3e-4), ((3e-4, 0.0, 0.0), 3e-4), ((0.0, 3e-4, -3e-4), None)],
    ids=["rounding", "second off", "first off", "all differ"],
)
def test_one_pass_of_three_may_differ(
    added: tuple[float, ...], apart: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at two starts on busy machines; a model that draws random numbers differs in every pass."""
    plain, offsets = self_test._packed, iter(added)
    monkeypatch.setattr(self_test, "_packed", lambda lm, rows: plain(lm, rows) + next(offsets))
    if apart is None:
        with pytest.raises(ModelError, match=r"differ by up to 0\.0003 nats"):
            check(tmp_path, tiny_config("phi3"))
    else:
        outcome = check(tmp_path, tiny_config("phi3"))
        assert outcome.passes_differ_by == pytest.approx(apart, rel=0.1)
        assert outcome.largest_error < 2e-5


def test_a_model_that_draws_and_whose_numbers_hardly_move_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = self_test._packed
    monkeypatch.setattr(self_test, "_packed", lambda lm, rows: plain(lm, rows) + 1e-9 * torch.rand(()))
    with pytest.raises(ModelError, match="the model draws random numbers somewhere"):
        check(tmp_path, tiny_config("phi3"))


@pytest.mark.parametrize(("longest", "is_refused"), [(32, False), (33, True)])
def test_rotary_embeddings_that_follow_the_longest_row_are_refused_beyond_their_length(
    longest: int, is_refused: bool, tmp_path: Path
) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = tiny_config(
        "phi3", original_max_position_embeddings=32, max_position_embeddings=128, rope_parameters=rope
    )
    if not is_refused:
        assert check(tmp_path, config, longest=longest).largest_error < 2e-5
        return
    with pytest.raises(ModelError, match="longrope rotary embeddings .* more than 32 tokens"):
        check(tmp_path, config, longest=longest)


def test_the_test_leaves_the_generator_of_the_run_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check(tmp_path, tiny_config("llama"))
    assert torch.equal(torch.rand(2), expected)


def test_a_large_model_is_tested_with_a_layer_of_each_sort() -> None:
    sorts = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    config = tiny_config(
        "gemma3_text", num_hidden_layers=24, layer_types=sorts, vocab_size=9000, sliding_window=512
    )
    small = self_test.shrink(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_hidden_layers, small.vocab_size, small.sliding_window) == (2, 256, 8)
    assert config.num_hidden_layers == 24


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kept_share", [1.0, 0.0])
def test_gradients_go_through_keys_that_layers_share(kept_share: float, ranks: Ranks, tmp_path: Path) -> None:
    """Gemma 4's last layers attend to keys and values of earlier ones; its factors of layers do not train."""
    config = tiny_config("gemma4_text")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, factor in model.named_buffers():
        if name.endswith(FACTOR):
            factor.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    options = LayerOptions(kept_share=kept_share)
    network = load_policy(tmp_path, ranks, Precision(compute=torch.float32), options=options)
    rows = self_test._rows(config)
    log_probs, expected = network(pack(rows, torch.device("cpu")))[0], self_test._one_by_one(model, rows)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
    log_probs.sum().backward()
    expected.sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in hugging_face_names(network):
        if name.endswith(FACTOR):
            assert torch.equal(parameter.full_tensor(), model.get_buffer(name))
            assert not parameter.requires_grad
            continue
        # Against float64 either's rounding is up to 2e-5 of a tensor's largest number.
        expected_grad = wanted[name].grad
        bound = 5e-5 * expected_grad.abs().max().item()
        torch.testing.assert_close(parameter.grad.full_tensor(), expected_grad, atol=bound, rtol=0.0)

    write_folder(tmp_path / "out", gathered_tensors(network, keep=True), source=tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    with pytest.raises(ConfigError, match=r"gemma4_text share keys and values.*actor.compile: false"):
        require_compilable(config)
    with pytest.raises(ConfigError, match="heads of several sizes; set learner.context_parallel: 1"):
        require_shared_tokens(config, 2)


def test_windows_that_an_engine_would_place_otherwise_are_refused(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelError, match="do not alternate between sliding_attention and full_attention"):
        check(tmp_path, tiny_config("gpt_oss", layer_types=kinds), trust=True)


def test_gemma_4_with_experts_is_refused(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    with pytest.raises(ModelError, match="has a router that Paceline does not know"):
        check(tmp_path, tiny_config("gemma4_text", **experts), trust=True)


def test_the_page_shows_the_table() -> None:
    """`PYTHONPATH=tests python -m support.architectures` prints it; its last column is tests/deploy's."""
    assert table(documented_pushes()) in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
