"""Mixture of Experts: checkpoints as transformers writes them, routers, their balance, the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config.load import dump_yaml
from paceline.core.errors import ConfigError, ModelError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow
from paceline.learner.checkpoint.load import load
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.export import export
from paceline.learner.model.decoder import experts
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.folder import gathered_tensors, write_folder
from paceline.learner.model.loading import Precision, as_fsdp, hugging_face_names, load_policy
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating.losses import PolicyLoss
from paceline.weights import corrections
from support.expert_models import COMMON_KINDS, corrections_of, write_model
from support.learner_fakes import VOCAB_SIZE, run_config
from support.learner_scenarios import numbers, save, take_step
from support.more import more

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU = torch.device("cpu")
NUM_CORRECTIONS = {"deepseek_v3": 2, "glm4_moe": 2, "glm4_moe_lite": 2, "minimax_m2": 3}
KINDS = (*COMMON_KINDS, "glm4_moe_lite", "llama4_text")


def rows() -> list[PackedRow]:
    rng = np.random.default_rng(1)
    return [
        PackedRow(
            index=index,
            prompt_token_ids=rng.integers(2, VOCAB_SIZE, prompt).astype(np.int32),
            response_token_ids=rng.integers(2, VOCAB_SIZE, response).astype(np.int32),
            response_mask=np.ones(response, np.uint8),
            response_log_probs=np.zeros(response, np.float32),
        )
        for index, (prompt, response) in enumerate([(3, 2), (5, 6), (5, 6)])
    ]


def log_probs_of(model: Any) -> Tensor:
    """By transformers, a row at a time."""
    parts = []
    for row in rows():
        ids = torch.from_numpy(
            np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
        )
        start = len(row.prompt_token_ids)
        scores = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
        parts.append(scores.gather(-1, ids[start:, None]).squeeze(-1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_experts_loads_trains_and_is_written_again(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "model", kind)
    network = load_policy(tmp_path / "model", ranks, Precision(compute=torch.float32))
    log_probs = network(pack(rows(), CPU))[0]
    expected = log_probs_of(model)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
    log_probs.sum().backward()
    expected.sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in hugging_face_names(network):
        if name.endswith(corrections.PARTS):
            assert not parameter.requires_grad
            continue
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad, atol=1e-4, rtol=1e-3)

    write_folder(tmp_path / "out", gathered_tensors(network, keep=True), source=tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    read = corrections_of(again)
    assert len(read) == NUM_CORRECTIONS.get(kind, 0)
    for name, correction in corrections_of(model).items():
        assert torch.equal(read[name], correction)


def test_an_expert_that_is_missing_is_named(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_model(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has no tensor 'model.layers.1.mlp.experts.2.up_proj.weight'"):
        load_policy(tmp_path, ranks, Precision(compute=torch.float32))


def test_routers_decide_in_float32_where_the_rest_is_half_precision(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load_policy(tmp_path, ranks, Precision(compute=torch.bfloat16))
    with torch.no_grad(), experts.recorded_choices(network.lm) as choices:
        network(pack(rows(), CPU))
    as_fsdp(network).reshard()
    assert [logits.dtype for logits, _ in choices] == [torch.float32] * 3
    # Sums of float32 are not on the coarse grid of bfloat16.
    assert not torch.equal(choices[0][0], choices[0][0].bfloat16().float())


def test_a_correction_of_scores_is_the_same_to_the_bit_in_training_and_in_the_export(
    ranks: Ranks, tmp_path: Path
) -> None:
    """In half precision, over steps, a checkpoint and a resume: bfloat16 would round it."""
    from transformers import AutoModelForCausalLM

    expected = corrections_of(write_model(tmp_path / "model", "deepseek_v3"))
    assert not any(torch.equal(value, value.bfloat16().float()) for value in expected.values())
    config = run_config(
        tmp_path / "model",
        model={"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        actor={"ppo_mini_batch_size": 8},
    )
    learner = Learner.build(config, ranks)
    seen: list[Tensor] = []
    for router in experts.routers(learner.actor.network.lm):
        router.register_forward_pre_hook(lambda router, inputs: seen.append(router.e_score_correction_bias))
    before = {name: value.clone() for name, value in expected.items()}
    take_step(learner, 1)
    assert len(seen) >= 2
    for name, value in zip(expected, seen, strict=False):
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    save(learner, tmp_path / "checkpoints" / "step_000001", step=1)
    resumed = Learner.build(config, ranks)
    with torch.no_grad():
        for name, parameter in resumed.actor.network.named_parameters():
            if name.endswith(corrections.PARTS):
                parameter.zero_()
    load(resumed, tmp_path / "checkpoints" / "step_000001")
    for name, parameter in hugging_face_names(resumed.actor.network):
        if name.endswith(corrections.PARTS):
            stored = name.removesuffix(corrections.PARTS) + corrections.BUFFER
            assert torch.equal(corrections.join(parameter.full_tensor()), expected[stored])
    (tmp_path / "config.resolved.yaml").write_text(dump_yaml(config))
    out = export(tmp_path, 1, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16
    read = corrections_of(again)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    # By these vLLM knows that it has to look for corrections.
    tree = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (tree["topk_method"], tree["scoring_func"]) == ("noaux_tc", "sigmoid")


@pytest.mark.parametrize("kind", ["llama4_text", *NUM_CORRECTIONS])
def test_the_balance_of_a_router_that_scores_by_the_sigmoid(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    network = load_policy(tmp_path, ranks, Precision(compute=torch.float32))
    logits: list[Tensor] = []
    for router in experts.routers(network.lm):
        router.register_forward_hook(lambda router, inputs, result: logits.append(result[0]))
    with torch.no_grad(), experts.recorded_choices(network.lm) as choices:
        network(pack(rows(), CPU))
    as_fsdp(network).reshard()
    for (scores, _), own in zip(choices, logits, strict=True):
        # DeepSeek-V3's equation 19: each expert's share of the row's scores.
        shares = own.sigmoid() / own.sigmoid().sum(-1, keepdim=True)
        torch.testing.assert_close(scores.softmax(-1), shares)


def test_the_balance_by_hand() -> None:
    batch = pack(rows()[:2], CPU)
    logits = torch.zeros(16, 4)
    even = torch.stack([torch.arange(16) % 4, (torch.arange(16) + 1) % 4], dim=-1)
    # The two states of the first row, tokens 2 and 3, choose (2, 3) and (3, 0); probabilities are even.
    assert experts.balance_by_row([(logits, even)], batch).tolist() == pytest.approx([1.0, 1.0])
    logits[:, 0] = 30.0
    always = torch.zeros(16, 2, dtype=torch.int64)
    always[:, 1] = 1
    # Everything goes to expert 0, with probability 1: E / K.
    assert experts.balance_by_row([(logits, always)], batch).tolist() == pytest.approx([2.0, 2.0])


def test_a_step_reports_the_balance_and_its_weight_changes_the_gradient(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    results = {}
    for name, actor in (
        ("off", {}),
        ("cut", {"ppo_max_token_len_per_gpu": 32}),
        ("on", {"load_balance_coef": 10.0}),
    ):
        config = run_config(
            tmp_path,
            algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
            actor={"ppo_mini_batch_size": 8, **actor},
        )
        results[name] = numbers(take_step(Learner.build(config, ranks), 1))
    assert 1.0 < results["off"]["actor/load_balance"] < 2.0
    assert results["cut"]["actor/load_balance"] == pytest.approx(
        results["off"]["actor/load_balance"], rel=1e-5
    )
    assert results["on"]["actor/load_balance"] == pytest.approx(
        results["off"]["actor/load_balance"], rel=1e-5
    )
    assert results["on"]["actor/grad_norm"] > 1.05 * results["off"]["actor/grad_norm"]


def test_a_model_without_experts_has_no_load_to_balance(model: Path, ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"load_balance_coef=0\.5 weighs .* has no experts, so it would"):
        Learner.load(run_config(model, actor={"load_balance_coef": 0.5}), ranks)


def test_the_loss_grows_with_the_imbalance(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the other sign the experts would be driven apart, and all metrics but the loss stay the same."""
    write_model(tmp_path, "qwen3_moe")
    honest, calls = PolicyLoss.__call__, list[tuple[float, float]]()

    def recording(self: PolicyLoss, *arguments: Any) -> tuple[Tensor, Tensor]:
        total, sums = honest(self, *arguments)
        calls.append((float(total.detach()), float(sums[self.names.index("load_balance")])))
        return total, sums

    monkeypatch.setattr(PolicyLoss, "__call__", recording)
    seen = []
    for coefficient in (0.0, 10.0):
        calls.clear()
        config = run_config(
            tmp_path,
            algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
            actor={"ppo_mini_batch_size": 8, "load_balance_coef": coefficient},
        )
        take_step(Learner.build(config, ranks), 1)
        seen.append(calls[0])  # of the first micro-batch, before any step
    (plain, balance), (balanced, same_balance) = seen
    assert same_balance == balance > 0
    assert balanced - plain == pytest.approx(10 * balance, rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    ["mixtral", "deepseek_v3", *more(*(kind for kind in KINDS if kind not in ("mixtral", "deepseek_v3")))],
)
def test_activations_that_are_recomputed_change_nothing(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    results = []
    for recompute in ("none", "full"):
        config = run_config(
            tmp_path,
            algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
            actor={
                "ppo_mini_batch_size": 8,
                "load_balance_coef": 10.0,
                "memory": {"recompute": recompute},
            },
        )
        results.append(numbers(take_step(Learner.build(config, ranks), 1)))
    kept, recomputed = results
    for name in ("actor/load_balance", "actor/grad_norm", "actor/pg_loss"):
        assert recomputed[name] == pytest.approx(kept[name], rel=1e-5)


def test_the_arithmetic_counts_the_experts_that_a_token_meets(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load_policy(tmp_path, ranks, Precision(compute=torch.float32))
    # A layer: q and o 32x32, k and v 16x32, norms of heads and layer, the router, two of four experts.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 2 * 8 + 2 * 32 + 4 * 32 + 2 * 3 * 16 * 32
    assert arithmetic_of(network).per_token == 6 * 3 * layer
