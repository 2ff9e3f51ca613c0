"""Adapters on experts, against a float64 model whose matrices W + scale B A are made one expert at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config.load import dump_yaml, parse
from paceline.config.model import LoraConfig
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.learner.batch.pack import pack
from paceline.learner.checkpoint.load import load
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.distributed.shards import own_part
from paceline.learner.export import export
from paceline.learner.model.architectures import UncompilableError
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, as_fsdp, hugging_face_names, load_policy
from paceline.learner.model.lora import A, B, _MergedExperts, base_alone, is_adapter, merged, with_adapters
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.learner import Learner
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory
from support.architectures import tiny_config
from support.expert_models import COMMON_KINDS, write_model
from support.learner_fakes import VOCAB_SIZE, draw_choices, run_config
from support.learner_scenarios import save, train
from support.learner_shapes import rows_with_holes

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU = torch.device("cpu")
FLOAT32 = Precision(compute=torch.float32)
LORA = LoraConfig(rank=2, alpha=3.0)
SCALE = 1.5
KINDS = (*COMMON_KINDS, "llama4_text", "qwen3_next")


def write_double(folder: Path, kind: str) -> Any:
    """A model that transformers wrote, in float64."""
    model = write_model(folder, kind, corrections_std=0.0)
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model.double()


def adapted_policy(folder: Path, ranks: Ranks, lora: LoraConfig = LORA) -> PolicyNetwork:
    """A policy whose adapters have been trained, as it were: B is not 0."""
    network = load_policy(folder, ranks, FLOAT32, lora=lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in hugging_face_names(network):
            if is_adapter(name):
                rows = own_part(parameter)[0]
                rows.copy_(0.1 * torch.randn(rows.shape, generator=generator))
    return network


def tensors_of(network: PolicyNetwork) -> dict[str, Tensor]:
    return {name: own_part(parameter)[0].detach().clone() for name, parameter in hugging_face_names(network)}


def adapter_of(name: str, tensors: dict[str, Tensor]) -> tuple[str, Tensor, Tensor] | None:
    """Prefix, A and B of a weight's adapter, by the names of docs and checkpoints."""
    owner, _, leaf = name.rpartition(".")
    prefix = owner if leaf == "weight" else f"{owner}.adapters.{leaf}"
    return (prefix, tensors[prefix + A], tensors[prefix + B]) if prefix + A in tensors else None


def materialise(model: Any, tensors: dict[str, Tensor]) -> int:
    """Adds scale B A to each matrix, one expert at a time; returns how many stacks of experts there are."""
    num_stacks = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (adapter := adapter_of(name, tensors)) is None:
                continue
            _, a, b = (part.double() if isinstance(part, Tensor) else part for part in adapter)
            if parameter.ndim == 2:
                parameter += SCALE * b @ a
                continue
            num_stacks += 1
            for expert in range(len(parameter)):
                parameter[expert] += SCALE * b[expert] @ a[expert]
    return num_stacks


def reference_log_probs(model: Any, rows: Any) -> Tensor:
    parts = []
    for row in rows:
        ids = torch.cat([torch.from_numpy(row.prompt_token_ids), torch.from_numpy(row.response_token_ids)])
        start = len(row.prompt_token_ids)
        scores = model(ids.long()[None]).logits[0, start - 1 : -1].log_softmax(-1)
        parts.append(scores.gather(-1, ids.long()[start:, None]).squeeze(-1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradients_are_those_of_matrices_made_expert_by_expert(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    model = write_double(tmp_path, kind)
    network = adapted_policy(tmp_path, ranks)
    tensors = tensors_of(network)
    assert materialise(model, tensors) >= 2
    rows = rows_with_holes([[(4, 3)], [(9, 5)], [(2, 6)]])
    expected = reference_log_probs(model, rows)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    log_probs = network(pack(rows, CPU))[0]
    (log_probs * weights).sum().backward()
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=1e-5)
    gradients: Any = {
        name: parameter.grad.full_tensor().double()
        for name, parameter in hugging_face_names(network)
        if parameter.grad is not None
    }
    assert gradients.keys() == {name for name in tensors if is_adapter(name)}
    for name, parameter in model.named_parameters():
        if (adapter := adapter_of(name, tensors)) is None:
            continue
        prefix, a, b = adapter
        of_weight = parameter.grad
        for ours, theirs in (
            (gradients[prefix + A], SCALE * b.double().mT @ of_weight),
            (gradients[prefix + B], SCALE * of_weight @ a.double().mT),
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-5 + 1e-4 * float(theirs.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_push_and_an_export_hold_the_same_merged_experts(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    model = write_double(tmp_path, kind)
    network = adapted_policy(tmp_path, ranks)
    before = tensors_of(network)
    with with_adapters(network):
        pushed = tensors_of(network)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(network).items())
    materialise(model, before)
    base = {name: tensor for name, tensor in before.items() if not is_adapter(name)}
    adapters = {name: tensor for name, tensor in before.items() if is_adapter(name)}
    exported = dict(merged(base.items(), adapters, LORA))
    assert exported.keys() == base.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, pushed[name]), name
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(exported[name].double(), parameter.detach(), atol=1e-6, rtol=1e-6)


def test_passes_compute_to_the_bit_with_what_is_pushed(ranks: Ranks, tmp_path: Path) -> None:
    write_double(tmp_path, "qwen3_moe")
    rows = rows_with_holes([[(4, 3)], [(9, 5)]])
    network, plain = adapted_policy(tmp_path, ranks), load_policy(tmp_path, ranks, FLOAT32)
    with torch.no_grad():
        expected = plain(pack(rows, CPU))[0]
        with base_alone(network):
            assert torch.equal(network(pack(rows, CPU))[0], expected)
        adapted = network(pack(rows, CPU))[0]
    assert not torch.allclose(adapted, expected, atol=1e-3)
    with with_adapters(network), base_alone(network), torch.no_grad():
        assert torch.equal(network(pack(rows, CPU))[0], adapted)


def test_replayed_choices_of_experts_go_to_the_merged_experts(ranks: Ranks, tmp_path: Path) -> None:
    write_double(tmp_path, "qwen3_moe")
    rows = [
        replace(row, expert_choices=draw_choices([row.index], len(row.prompt_token_ids) + length, 3, 4, 2))
        for row in rows_with_holes([[(4, 3)], [(9, 5)]])
        for length in [len(row.response_token_ids)]
    ]
    network, chooses = adapted_policy(tmp_path, ranks), adapted_policy(tmp_path, ranks)
    network.replay_choices()
    with torch.no_grad():
        replayed, chosen = network(pack(rows, CPU))[0], chooses(pack(rows, CPU))[0]
        with with_adapters(network), base_alone(network):
            assert torch.equal(network(pack(rows, CPU))[0], replayed)
    assert not torch.allclose(replayed, chosen, atol=1e-3)


def test_the_backward_pass_keeps_no_merged_experts(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose experts are nearly all of it."""
    config = tiny_config("qwen3_moe", vocab_size=VOCAB_SIZE, num_experts=64, num_hidden_layers=4)
    config.save_pretrained(tmp_path)
    network = load_policy(tmp_path, ranks, FLOAT32, random_seed=0, lora=LORA)
    sizes, plain = dict[int, int](), _MergedExperts.pack

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def pack_and_note(merged_experts: _MergedExperts, saved: Tensor) -> Any:
        kept = plain(merged_experts, saved)
        return note(kept) if isinstance(kept, Tensor) else kept

    monkeypatch.setattr(_MergedExperts, "pack", pack_and_note)
    own = {own_part(p)[0].untyped_storage().data_ptr() for _, p in hugging_face_names(network)}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        network(pack(rows_with_holes([[(2, 1)]]), CPU))
    experts = 4 * 4 * 64 * 3 * config.hidden_size * config.moe_intermediate_size
    kept = sum(num_bytes for pointer, num_bytes in sizes.items() if pointer not in own)
    assert 0 < kept < experts / 4, (kept, experts)


def run_of(folder: Path) -> RunConfig:
    tree = run_config(
        folder,
        model={"lora": {"rank": 2, "alpha": 3.0}},
        actor={"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-2}},
    ).model_dump(mode="json")
    tree["algorithm"]["adv_estimator"] = "grpo"  # no critic
    return parse(RunConfig, tree)


def test_a_run_trains_adapters_of_experts_goes_on_from_a_checkpoint_and_exports(
    ranks: Ranks, tmp_path: Path
) -> None:
    write_double(tmp_path / "model", "qwen2_moe")
    config = run_of(tmp_path / "model")
    first = Learner.build(config, ranks)
    before = tensors_of(first.actor.network)
    step = train(first, 1, 1)[0]
    assert step["actor/first_ppo_kl"] == step["algorithm/reference_kl"] == 0.0
    save(first, tmp_path / "checkpoints" / "step_000001", step=1)
    second = Learner.build(config, ranks)
    load(second, tmp_path / "checkpoints" / "step_000001")
    assert train(first, 2, 2) == train(second, 2, 2)
    as_fsdp(second.actor.network).reshard()
    after = tensors_of(second.actor.network)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if is_adapter(name)}

    save(second, tmp_path / "checkpoints" / "step_000002", step=2)
    (tmp_path / "config.resolved.yaml").write_text(dump_yaml(config), encoding="utf-8")
    out = export(tmp_path, 2, tmp_path / "out")
    exported = dict(load_policy(out, ranks, FLOAT32).lm.named_parameters())
    with with_adapters(second.actor.network):
        pushed = tensors_of(second.actor.network)
    for name, parameter in exported.items():
        assert torch.equal(own_part(parameter)[0], pushed[name]), name
    assert not (out / "adapter").exists()  # PEFT's library has another layout for experts


def test_the_memory_plan_counts_what_the_learner_keeps(ranks: Ranks, tmp_path: Path) -> None:
    write_double(tmp_path, "qwen2_moe")
    config = run_of(tmp_path)
    learner = Learner.build(config, ranks)
    train(learner, 1, 1)
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    assert shape is not None
    plan, network = LearnerMemory.of(config, shape), learner.actor.network
    as_fsdp(network).reshard()
    tensors = tensors_of(network)
    assert plan.resident["weights"] == sum(tensor.nbytes for tensor in tensors.values())
    averages = [
        tensor for name, tensor in learner.actor.optimizer.state().items() if not name.endswith("step")
    ]
    assert plan.resident["optimizer"] == sum(own_part(tensor)[0].nbytes for tensor in averages)
    adapted = [tensor for name, tensor in tensors.items() if adapter_of(name, tensors) is not None]
    assert plan.push["merged"] == sum(tensor.nbytes for tensor in adapted)
    layer = [tensor for name, tensor in tensors.items() if "layers.0.mlp.experts." in name]
    assert plan.num_merged == sum(tensor.numel() for tensor in layer[:2])
    assert not plan.compiled
    # A pass merges a layer's experts, and the backward pass has a gradient of that size.
    added = plan.update["gathered"] - plan.changed(num_merged=0).update["gathered"]
    assert added == 2 * sum(tensor.nbytes for tensor in layer[:2])
    # Muon keeps one average of a matrix; adapters of experts are stacks, which AdamW trains.
    saved = plan.resident["optimizer"] - plan.changed(muon=True).resident["optimizer"]
    matrices = [tensor for name, tensor in tensors.items() if is_adapter(name) and tensor.ndim == 2]
    assert saved == sum(tensor.nbytes for tensor in matrices)


def test_targets_name_experts_by_their_parameters(ranks: Ranks, tmp_path: Path) -> None:
    write_double(tmp_path, "qwen3_moe")
    network = load_policy(tmp_path, ranks, FLOAT32, lora=LoraConfig(rank=2, targets=("down_proj",)))
    names = {name for name, _ in hugging_face_names(network) if is_adapter(name)}
    assert names == {
        f"model.layers.{layer}.mlp.experts.adapters.down_proj{part}" for layer in range(3) for part in (A, B)
    }
    with pytest.raises(ConfigError, match="it has down_proj, gate_up_proj, k_proj, o_proj, q_proj, v_proj"):
        load_policy(tmp_path, ranks, FLOAT32, lora=LoraConfig(targets=("gate_proj",)))
    with pytest.raises(ConfigError, match="rank=33 is above the smaller side of gate_up_proj"):
        lora = LoraConfig(rank=33, targets=("gate_up_proj",))
        load_policy(tmp_path, ranks, FLOAT32, lora=lora)
    with pytest.raises(UncompilableError, match="experts of Qwen3MoeForCausalLM have adapters"):
        options = LayerOptions(compiled=True)
        load_policy(tmp_path, ranks, FLOAT32, lora=LORA, options=options)
