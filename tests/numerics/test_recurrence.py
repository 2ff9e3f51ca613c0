"""Layers with a state over packed rows: each sequence by itself, with prompts that several answers share."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.checks.service_checks import engine_log_probs
from paceline.core.errors import ConfigError, ModelError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow, PackedSequences
from paceline.learner.model.architectures import (
    UncompilableError,
    recurrent_layers,
    require_compilable,
    require_shared_tokens,
)
from paceline.learner.model.decoder import recurrence_kernel
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.loading import draw_normal, empty_lm, give_storage
from paceline.learner.model.networks import PolicyNetwork
from paceline.rollout.engines.vllm.start.arguments import engine_arguments
from support.architectures import tiny_config
from support.cli_configs import config as run_config

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
KINDS = ["qwen3_next", "qwen3_5_text", "qwen3_5"]
# Prompts with the lengths of their answers: in one padded batch, with free places before the prefix, within
# one chunk of the recurrence and over several, and longer than what is padded.
FAMILIES = ((5, (3, 9, 4)), (20, (7, 7)), (70, (80, 200)))


def network(kind: str) -> PolicyNetwork:
    """A policy with drawn weights."""
    lm = empty_lm(tiny_config(kind))
    give_storage(lm, lm, CPU, torch.float32)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.copy_(draw_normal(parameter.shape, parameter.shape[-1] ** -0.5, 0, name))
            if parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
                parameter.add_(1.0)
    return PolicyNetwork(lm)


def rows_of(families: Any = FAMILIES) -> list[PackedRow]:
    rng, rows = np.random.default_rng(0), list[PackedRow]()
    for prompt_size, sizes in families:
        prompt = rng.integers(0, 90, prompt_size).astype(np.int32)
        rows += [
            PackedRow(
                index=len(rows) + place,
                prompt_token_ids=prompt,
                response_token_ids=rng.integers(0, 90, size).astype(np.int32),
                response_mask=np.ones(size, np.uint8),
                response_log_probs=np.zeros(size, np.float32),
            )
            for place, size in enumerate(sizes)
        ]
    return rows


def run(policy: PolicyNetwork, rows: list[PackedRow], *, share: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of a sum with a weight of its own for each token."""
    policy.zero_grad()
    log_probs = policy(pack(rows, CPU, share_prompts=share)).log_probs
    (log_probs * torch.linspace(-1.0, 1.0, len(log_probs))).sum().backward()
    gradients = {name: part.grad for name, part in policy.named_parameters() if part.grad is not None}
    return log_probs.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_numbers_with_shared_prompts_without_and_alone(kind: str) -> None:
    policy, rows = network(kind), rows_of()
    assert len(recurrent_layers(policy)) == 2
    apart, own = run(policy, rows, share=False)
    shared, others = run(policy, rows, share=True)
    # Not to the bit on every CPU: a product's rounding may depend on its number of rows.
    torch.testing.assert_close(shared, apart, rtol=0.0, atol=2e-5)
    assert {"A_log", "dt_bias", "weight"} <= {name.rpartition(".")[2] for name in own}
    for name, gradient in own.items():
        torch.testing.assert_close(others[name], gradient, rtol=0.0, atol=1e-4 * float(gradient.abs().max()))
    alone = torch.cat([run(policy, [row], share=False)[0] for row in rows])
    torch.testing.assert_close(apart, alone, rtol=0.0, atol=2e-5)


def rule_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """flash-linear-attention's function on a CPU: transformers' code, a sequence at a time."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    states, cu_seqlens = options.get("initial_state"), options["cu_seqlens"]
    assert torch.equal(cu_seqlens, options["cu_seqlens_cpu"])
    assert cu_seqlens[-1] == query.shape[1]
    repeat = value.shape[2] // query.shape[2]
    parts = []
    for index, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        own = [part[:, start:stop] for part in (query, key, value, g, beta)]
        own[:2] = (part.repeat_interleave(repeat, dim=2) for part in own[:2])
        parts.append(
            torch_chunk_gated_delta_rule(
                *own[:3],
                g=own[3],
                beta=own[4],
                initial_state=None if states is None else states[index : index + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
            )
        )
    out, last = zip(*parts, strict=True)
    return torch.cat(out, 1), torch.cat(last)


# Prompts of 1, 5, 70 and 2 tokens, each with two answers; some are shorter than the convolution.
LENGTHS = [1, 1, 2, 5, 3, 9, 70, 80, 3, 2, 5, 1]
PREFIXES = [None, 0, 0, None, 3, 3, None, 6, 6, None, 9, 9]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("prefixes", [[], PREFIXES], ids=["apart", "shared"])
def test_a_kernel_that_starts_from_states_gives_what_padded_rows_give(
    monkeypatch: pytest.MonkeyPatch, kind: str, prefixes: list[int | None]
) -> None:
    layer, draw = recurrent_layers(network(kind))[0], torch.Generator().manual_seed(0)
    packed = PackedSequences.of(LENGTHS, CPU, prefixes)
    hidden, weights = torch.randn(2, 1, sum(LENGTHS), 32, generator=draw)

    def numbers() -> dict[str, Tensor]:
        layer.zero_grad()
        states = hidden.clone().requires_grad_()
        out = layer(states, packed=packed.for_pass(None))
        (out * weights).sum().backward()
        gradients = {name: part.grad.clone() for name, part in layer.named_parameters()}
        return {"out": out.detach(), "hidden": states.grad, **gradients}

    padded = numbers()
    monkeypatch.setattr(recurrence_kernel, "rule_for", lambda device: rule_by_sequence)
    chained = numbers()
    assert not torch.equal(chained["out"], padded["out"])
    assert {"A_log", "dt_bias", "conv1d.weight"} <= padded.keys()
    for name, expected in padded.items():
        most = 5e-5 * float(expected.abs().max())
        torch.testing.assert_close(chained[name], expected, rtol=0.0, atol=most)


def test_a_token_changes_what_follows_in_its_row_and_nothing_of_its_neighbours() -> None:
    policy, rows = network("qwen3_next"), rows_of(((9, (6,)), (9, (6,)), (9, (6,))))
    before, _ = run(policy, rows, share=False)
    rows[1].prompt_token_ids[0] += 1
    after, _ = run(policy, rows, share=False)
    changed = (before != after).split(6)
    assert [bool(part.any()) for part in changed] == [False, True, False]
    assert bool(changed[1].all())


def test_layers_that_are_told_nothing_of_sequences_refuse() -> None:
    layer = recurrent_layers(network("qwen3_next"))[0]
    with pytest.raises(ModelError, match="does not tell its layers where sequences begin"):
        layer(torch.zeros(1, 4, 32))
    packed = PackedSequences.of([4], CPU)
    assert layer(torch.ones(1, 4, 32), packed=packed).shape == (1, 4, 32)


def test_layers_with_a_state_are_neither_compiled_nor_shared_and_have_no_pairs_of_tokens() -> None:
    config = tiny_config("qwen3_next")
    with pytest.raises(UncompilableError, match=r"hand a state from token to token.*actor.compile: false"):
        require_compilable(config)
    with pytest.raises(
        ConfigError, match=r"hand a state from token to token; set learner.context_parallel: 1"
    ):
        require_shared_tokens(config, 2)
    # Keys and values of the four heads of one layer: 4 x (8 + 8), three times.
    assert arithmetic_of(network("qwen3_next")).per_pair == 3 * 64


def test_a_tower_without_windows_sees_all_pairs_of_patches_in_each_layer() -> None:
    arithmetic = arithmetic_of(network("qwen3_5"))
    assert arithmetic.per_pair == 3 * 64
    assert arithmetic.per_patch_pair == 2 * 4 * 16
    # Patches of 96 numbers; a layer's four projections, MLP and two norms; a merger of 4 patches.
    layer = 4 * 16 * 17 + 16 * 24 + 24 + 24 * 16 + 16 + 4 * 16
    merger = 2 * 16 + 64 * 65 + 65 * 32
    assert arithmetic.per_patch == 2 * (97 * 16 + 2 * layer) + 2 * merger // 4


def test_the_engine_keeps_states_in_float32_and_no_prefixes(tmp_path: Path) -> None:
    tiny_config("qwen3_next").save_pretrained(tmp_path)
    run = run_config(model={"path": str(tmp_path), "dtype": "bfloat16"})
    for on_cpu in (False, True):
        arguments = engine_arguments(run, on_cpu=on_cpu)
        assert arguments["mamba_ssm_cache_dtype"] == "float32"
        assert arguments["enable_prefix_caching"] is False
    single = run_config(model={"path": str(tmp_path), "dtype": "float32"})
    with pytest.raises(ConfigError, match=r"only in bfloat16, but model.dtype is float32"):
        engine_arguments(single, on_cpu=True)
    assert engine_arguments(single, on_cpu=False)["dtype"] == "float32"
    assert "only in bfloat16; guard.mismatch_kl compares them" in engine_log_probs(run, tmp_path)

    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    assert "mamba_ssm_cache_dtype" not in engine_arguments(single, on_cpu=True)


def crossing(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A kernel that does not know where the second sequence ends."""
    offsets = options["cu_seqlens"][[0, 1, 3]]
    states = options["initial_state"]
    out, last = rule_by_sequence(
        query,
        *others,
        **options | {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets, "initial_state": states[:2]},
    )
    return out, torch.cat([last, states[2:]])


def without_gradients(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A kernel that raises in the backward pass, as fla-core with some versions of Triton."""
    out, last = rule_by_sequence(*inputs, **options)

    def refuse(_: Tensor) -> None:
        raise RuntimeError("incorrect results for gated chunk_bwd_dqkwg")

    out.register_hook(refuse)
    return out, last


@pytest.mark.parametrize(
    ("rule", "said"),
    [(rule_by_sequence, ""), (crossing, "its numbers differ"), (without_gradients, "incorrect results")],
)
def test_a_kernel_is_used_only_if_a_trial_gives_right_numbers(
    rule: recurrence_kernel.Rule, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where no gradients are wanted, as in a first pass that only scores."""
    with torch.no_grad():
        assert recurrence_kernel.works(rule, torch.float32, CPU) is not bool(said)
    assert said in caplog.text
    assert bool(caplog.text) is bool(said)
