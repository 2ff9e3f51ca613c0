"""Adapters: what trains, what a push sends, what the reference is, what checkpoints and exports hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.config.load import dump_yaml, parse
from paceline.config.model import LoraConfig
from paceline.config.run import RunConfig
from paceline.config.tuning import SftRunConfig
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.run_record.manifest import manifest_text
from paceline.learner.batch.pack import pack
from paceline.learner.checkpoint.load import load, load_newest
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.distributed.shards import own_part
from paceline.learner.export import export
from paceline.learner.model.loading import (
    Precision,
    as_fsdp,
    digest_of_frozen,
    forget_forward_passes,
    hugging_face_names,
    load_policy,
)
from paceline.learner.model.lora import LoraLinear, adapter_names, base_alone, is_adapter, with_adapters
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.learner import Learner
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory
from support.learner_fakes import run_config
from support.learner_scenarios import save, take_step, train
from support.learner_shapes import rows_with_holes

NUM_LAYERS = 2
ADAPTERS = {"lora": {"rank": 4, "alpha": 8.0}}


def _config(model: Path, **lora: Any) -> RunConfig:
    actor = {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-2}}
    return run_config(model, model={"lora": {**ADAPTERS["lora"], **lora}}, actor=actor)


def _tensors(learner: Learner) -> dict[str, Tensor]:
    as_fsdp(learner.actor.network).reshard()
    return {name: own_part(p)[0].detach().clone() for name, p in hugging_face_names(learner.actor.network)}


@pytest.mark.parametrize(
    ("targets", "most", "sentence"),
    [
        (["all"], 12, "k_proj, which has 12 rows and 24 columns"),
        (["q_proj"], 24, "q_proj, which has 24 rows and 24 columns"),
    ],
)
def test_a_rank_above_the_layers_is_refused(
    model: Path, ranks: Ranks, targets: list[str], most: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rank={most + 1} is above the smaller side of {sentence}"):
        Learner.load(_config(model, rank=most + 1, targets=targets), ranks)
    Learner.load(_config(model, rank=most, targets=targets), ranks)


@pytest.fixture(scope="module")
def trained(model: Path, ranks: Ranks) -> Learner:
    """Two steps of training at a rate that moves the policy far."""
    learner = Learner.build(_config(model), ranks)
    first, second = train(learner, 1, 2)
    assert first["actor/first_ppo_kl"] == 0.0
    # Fresh adapters change nothing, and the reference is scored without them.
    assert first["algorithm/reference_kl"] == 0.0
    assert abs(second["algorithm/reference_kl"]) > 1e-4
    return learner


def test_adapters_alone_train_and_have_optimizer_state(model: Path, ranks: Ranks, trained: Learner) -> None:
    before, after = _tensors(Learner.build(_config(model), ranks)), _tensors(trained)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if is_adapter(name)}
    assert len(changed) == 2 * 7 * 2  # A and B of seven matrices in two layers
    owners = {name.rpartition(".")[0] for name in trained.actor.optimizer.state()}
    assert owners == changed


def _log_probs(network: PolicyNetwork) -> Tensor:
    with torch.no_grad():
        values: Tensor = network(pack(rows_with_holes([[(4, 3)], [(9, 5)]]), torch.device("cpu")))[0]
    forget_forward_passes(network)
    return values


def test_the_reference_is_the_base_and_takes_no_memory(model: Path, ranks: Ranks, trained: Learner) -> None:
    assert trained.frozen["reference"].network is trained.actor.network
    base = load_policy(model, ranks, Precision(compute=torch.float32))
    with base_alone(trained.actor.network):
        assert torch.equal(_log_probs(trained.actor.network), _log_probs(base))


def test_a_push_sends_the_merged_weights_and_leaves_the_base_as_it_was(trained: Learner) -> None:
    network = trained.actor.network
    before, own = _tensors(trained), dict(hugging_face_names(network))
    addresses = {name: own_part(parameter)[0].data_ptr() for name, parameter in own.items()}
    with with_adapters(network):
        merged = _tensors(trained)
        assert {name: own_part(parameter)[0].data_ptr() for name, parameter in own.items()} == addresses
    after = _tensors(trained)
    assert all(torch.equal(before[name], after[name]) for name in before)
    prefix = "model.layers.1.self_attn.k_proj"
    product = before[f"{prefix}.lora_b"] @ before[f"{prefix}.lora_a"]
    expected = before[f"{prefix}.weight"] + 8.0 / 4 * product
    assert torch.allclose(merged[f"{prefix}.weight"], expected, atol=1e-6)
    assert not torch.allclose(merged[f"{prefix}.weight"], before[f"{prefix}.weight"], atol=1e-3)
    untouched = [name for name in before if "norm" in name or "embed" in name or "lm_head" in name]
    assert all(torch.equal(merged[name], before[name]) for name in untouched)


def test_rollout_servers_see_a_plain_model(model: Path, ranks: Ranks, trained: Learner) -> None:
    def published(network: PolicyNetwork) -> dict[str, tuple[int, ...]]:
        as_fsdp(network).reshard()
        lm = network.lm
        layout = WeightPublisher(lm, torch.device("cpu"), exclude=adapter_names(lm)).layout()
        return {part.name: part.global_shape for part in layout.slices}

    plain = load_policy(model, ranks, Precision(compute=torch.float32))
    assert published(trained.actor.network) == published(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_that_is_trained_is_the_one_that_is_pushed(model: Path, ranks: Ranks, dtype: str) -> None:
    """To the bit: in bfloat16 a merged matrix is rounded otherwise than W x and B A x apart."""
    config = _config(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    learner = Learner.build(config, ranks)
    train(learner, 1, 2)
    network = learner.actor.network
    adapted = _log_probs(network)
    with base_alone(network):
        base = _log_probs(network)
        with with_adapters(network):
            pushed = _log_probs(network)
    assert torch.equal(pushed, adapted)
    assert (base - adapted).abs().max() > 1e-2
    assert torch.equal(_log_probs(network), adapted)


def test_gradients_of_adapters_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 5)
    LoraLinear.convert(linear, LoraConfig(rank=3, alpha=6.0))
    assert isinstance(linear, LoraLinear)
    with torch.no_grad():
        linear.lora_a.normal_()
        linear.lora_b.normal_()
    x, seen = torch.randn(2, 4, 6, requires_grad=True), torch.randn(2, 4, 5)
    expected = x @ (linear.weight + 2.0 * linear.lora_b @ linear.lora_a).T + linear.bias
    assert torch.allclose(linear(x), expected, atol=1e-6)
    wanted = torch.autograd.grad(expected, [x, linear.lora_a, linear.lora_b], seen)
    got = torch.autograd.grad(linear(x), [x, linear.lora_a, linear.lora_b], seen)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(got, wanted, strict=True))


def test_rows_with_adapters_can_share_their_prompt(model: Path, ranks: Ranks) -> None:
    """The check of the first shared batch looks at gradients, and what is frozen has none."""
    plain = _config(model)
    shared = plain.model_copy(update={"actor": plain.actor.model_copy(update={"shared_prompts": "on"})})
    learner = Learner.build(shared, ranks)
    metrics = take_step(learner, 1).metrics
    assert metrics["timing_s/shared_prompts"] > 0
    assert metrics["perf/computed_share"] < 1
    expected = take_step(Learner.build(plain, ranks), 1).metrics
    for name in ("actor/grad_norm", "actor/entropy", "actor/pg_loss"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=2e-6), name


def test_a_checkpoint_holds_the_adapters_and_a_run_goes_on_from_it(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    config = _config(model, targets=["q_proj", "down_proj"])
    first = Learner.build(config, ranks)
    train(first, 1, 1)
    save(first, tmp_path / "step_000001", step=1)
    second = Learner.build(config, ranks)
    load(second, tmp_path / "step_000001")
    assert train(first, 2, 2) == train(second, 2, 2)


def test_an_export_has_merged_weights_and_adapters_in_the_layout_of_peft(
    trained: Learner, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    learner = trained
    save(learner, tmp_path / "checkpoints" / "step_000002", step=2)
    (tmp_path / "config.resolved.yaml").write_text(dump_yaml(learner.config))
    out = export(tmp_path, 2, tmp_path / "out")
    exported = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    own = _tensors(learner)
    as_fsdp(learner.actor.network).reshard()
    with with_adapters(learner.actor.network):
        merged = _tensors(learner)
    for name, parameter in exported.items():
        assert torch.equal(parameter, merged[name]), name
    described = json.loads((out / "adapter/adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["peft_type"]) == (4, 8.0, "LORA")
    assert described["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    adapters = load_file(out / "adapter/adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(adapters[f"base_model.model.{name}.lora_A.weight"], own[f"{name}.lora_a"])
    assert torch.equal(adapters[f"base_model.model.{name}.lora_B.weight"], own[f"{name}.lora_b"])
    assert len(adapters) == 28


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"alpha": 32.0}, r"alpha: 8.0, .* now model.lora says .*alpha: 32.0"),
        ({"rank": 8, "alpha": 16.0}, r"rank: 4, .* now model.lora says .*rank: 8"),
        ({"targets": ["q_proj"]}, r"targets: \[down_proj, .* now model.lora says .*targets: \[q_proj\]"),
    ],
)
def test_a_run_does_not_go_on_with_other_adapters(
    model: Path, ranks: Ranks, trained: Learner, tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    save(trained, tmp_path / "step_000002", step=2)
    other = Learner.build(_config(model, **changed), ranks)
    with pytest.raises(CheckpointError, match=sentence):
        load_newest(other, [tmp_path / "step_000002"])
    plain = Learner.build(run_config(model), ranks)
    with pytest.raises(CheckpointError, match=r"now model.lora says null"):
        load_newest(plain, [tmp_path / "step_000002"])
    named = Learner.build(
        _config(model, targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ranks,
    )
    assert load_newest(named, [tmp_path / "step_000002"]) == tmp_path / "step_000002"


def test_an_export_takes_rank_and_alpha_from_the_checkpoint(
    model: Path, trained: Learner, tmp_path: Path
) -> None:
    save(trained, tmp_path / "checkpoints" / "step_000002", step=2)
    outs = []
    for name, config in (("same", trained.config), ("changed", _config(model, rank=2, alpha=64.0))):
        (tmp_path / "config.resolved.yaml").write_text(dump_yaml(config))
        outs.append(export(tmp_path, 2, tmp_path / name))
    same, changed = (load_file(out / "model.safetensors") for out in outs)
    assert all(torch.equal(same[name], changed[name]) for name in same)
    described = json.loads((outs[1] / "adapter/adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 8.0)


def test_adapters_go_with_no_other_base(model: Path, ranks: Ranks, trained: Learner, tmp_path: Path) -> None:
    save(trained, tmp_path / "checkpoints" / "step_000002", step=2)
    folder = tmp_path / "checkpoints" / "step_000002"
    base = shutil.copytree(model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():  # the same numbers in other files: the same base
        save_file({name: tensor}, base / f"{name}.safetensors", metadata={"format": "pt"})
    (base / "model.safetensors").unlink()
    assert load_newest(Learner.build(_config(base), ranks), [folder]) == folder
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, -1] += 1e-3
    save_file({name: tensors[name]}, base / f"{name}.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="were trained on other frozen weights .* set model.path back"):
        load_newest(Learner.build(_config(base), ranks), [folder])
    manifest = (folder / "manifest.json").read_text().replace(str(model), str(base))
    fields = manifest_fields_of(manifest)
    (folder / "manifest.json").write_text(manifest_text(fields))
    (tmp_path / "config.resolved.yaml").write_text(dump_yaml(_config(base)))
    with pytest.raises(CheckpointError, match="were trained on other frozen weights .* set model.path back"):
        export(tmp_path, 2, tmp_path / "out")


def test_a_digest_looks_at_all_parts_of_a_large_tensor(tmp_path: Path) -> None:
    name, values = "model.weight", torch.zeros(4096, 128)
    (tmp_path / "config.json").write_text("{}")
    digests = set()
    for part in (None, 0, 1000, 2000, 3000, 4095):
        changed = values.clone()
        if part is not None:
            changed[part : part + 300] = 1.0
        save_file({name: changed}, tmp_path / "model.safetensors")
        digests.add(digest_of_frozen(tmp_path, [(name, values)]))
        assert digest_of_frozen(tmp_path, [(name, values)]) in digests
    assert len(digests) == 6
    assert digest_of_frozen(tmp_path, []) == ""
    assert digest_of_frozen(tmp_path, [(name, values)], 3) != digest_of_frozen(tmp_path, [(name, values)], 4)


def manifest_fields_of(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(text)
    return {name: value for name, value in fields.items() if name not in ("digest", "schema")}


def test_what_adapters_cannot_do_is_refused(model: Path, ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="names qkv, which is no linear layer of Qwen2For.*; it has down"):
        Learner.build(_config(model, targets=["q_proj", "qkv"]), ranks)
    sft = {"train_files": "a.jsonl", "output": "out", "steps": 1}
    with pytest.raises(ConfigError, match="train all weights; leave model.lora out"):
        parse(SftRunConfig, {"sft": sft, "data": {}, "model": {"path": str(model), **ADAPTERS}})


@pytest.mark.parametrize("targets", [("all",), ("q_proj", "down_proj")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_plan_counts_what_the_learner_keeps(
    model: Path, ranks: Ranks, dtype: str, targets: tuple[str, ...]
) -> None:
    tree = _config(model, targets=targets).model_dump(mode="json")
    tree["model"]["dtype"] = dtype
    tree["algorithm"]["adv_estimator"] = "grpo"  # no critic
    config = parse(RunConfig, tree)
    assert config.needs_reference
    learner = Learner.build(config, ranks)
    train(learner, 1, 1)
    shape = ModelShape.of(json.loads((model / "config.json").read_text(encoding="utf-8")))
    assert shape is not None
    plan = LearnerMemory.of(config, shape)
    network = learner.actor.network
    as_fsdp(network).reshard()
    parameters = [parameter for _, parameter in hugging_face_names(network)]
    assert plan.resident["weights"] == sum(own_part(p)[0].nbytes for p in parameters)
    averages = [
        tensor for name, tensor in learner.actor.optimizer.state().items() if not name.endswith("step")
    ]
    assert plan.resident["optimizer"] == sum(own_part(tensor)[0].nbytes for tensor in averages)
    adapted = [module for module in network.modules() if isinstance(module, LoraLinear)]
    number_bytes = 2 if dtype == "bfloat16" else 4
    assert plan.push["merged"] == number_bytes * sum(module.weight.numel() for module in adapted)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    assert plan.changed(accumulates=True).update["gradients"] == 4 * trained
