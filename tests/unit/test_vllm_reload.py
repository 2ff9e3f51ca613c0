"""The general path's loading, with a loader that behaves like vLLM's: it collects weights layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.core.errors import ModelError, PeerLostError
from paceline.core.members import LocalPart
from paceline.rollout.engines.vllm.reload import Reloader, Tensors
from paceline.rollout.engines.weights.checkpoint import checkpoint_tensors, learner_shapes
from paceline.rollout.engines.weights.trace import traced
from paceline.weights import corrections
from support.architectures import tiny_config

pytestmark = pytest.mark.torch


class Model(nn.Module):
    """Two layers of two parameters; `skip` is not reported as loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.collected: dict[str, torch.Tensor] = {}
        self.aside: dict[str, nn.Parameter] = {}
        self.skip: set[str] = set()
        self.says = True

    def load_weights(self, weights: Tensors) -> set[str] | None:
        """Collects; a layer is written when both of its tensors are there."""
        names = set()
        for name, tensor in weights:
            self.collected[name] = tensor
            names.add(name)
            layer = name.rpartition(".")[0]
            pair = [f"{layer}.weight", f"{layer}.bias"]
            if all(part in self.collected for part in pair):
                for part in pair:
                    self.put_back(part, self.collected.pop(part))
        return names - self.skip if self.says else None

    def put_back(self, name: str, value: torch.Tensor | None) -> None:
        """A parameter gets its old storage back."""
        if name in self.aside:
            layer, _, kind = name.rpartition(".")
            old = self.aside.pop(name)
            setattr(self.get_submodule(layer), kind, old)
            if value is not None:
                old.data.copy_(value)

    def reload(self, tensors: Tensors) -> None:
        """Moves parameters aside, unless an earlier reload has left them there; loads; puts back."""
        for name, param in list(self.named_parameters()):
            if name not in self.aside:
                layer, _, kind = name.rpartition(".")
                self.aside[name] = param
                setattr(self.get_submodule(layer), kind, nn.Parameter(torch.empty_like(param)))
        self.load_weights(tensors)
        self.finish()

    def finish(self) -> None:
        """Ends a reload."""
        for name in list(self.aside):
            self.put_back(name, self.collected.get(name))
        self.collected.clear()


NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]


def tensors(
    value: float, *, names: list[str] = NAMES, fail_at: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, name in enumerate(names):
        if number == fail_at:
            raise PeerLostError("the learner went away", peer="learner")
        yield name, torch.full((2, 2) if name.endswith("weight") else (2,), value)


def values(model: nn.Module) -> set[float]:
    return {value for param in model.parameters() for value in param.detach().flatten().tolist()}


@pytest.mark.parametrize("fail_at", [0, 1, 2, 3])
def test_a_load_that_breaks_off_leaves_nothing_to_the_next(fail_at: int) -> None:
    model = Model()
    addresses = [param.data_ptr() for param in model.parameters()]
    reloader = Reloader(model, model.reload, model.finish)
    reloader.load(tensors(1.0))
    with pytest.raises(PeerLostError, match="the learner went away"):
        reloader.load(tensors(2.0, fail_at=fail_at))
    # In another order: what the broken load had collected would complete a layer with old values.
    reloader.load(tensors(3.0, names=NAMES[::-1]))
    assert values(model) == {3.0}
    assert [param.data_ptr() for param in model.parameters()] == addresses
    assert "load_weights" not in vars(model)


def refuse() -> None:
    raise RuntimeError("cannot finish")


@pytest.mark.parametrize("finish", [refuse, lambda: None])
def test_a_loader_that_cannot_be_restored_wants_another_engine(finish: Callable[[], None]) -> None:
    model = Model()
    reloader = Reloader(model, model.reload, finish)
    with pytest.raises(PeerLostError, match="the learner went away"):
        reloader.load(tensors(2.0, fail_at=1))
    with pytest.raises(PeerLostError, match="restart the engine") as caught:
        reloader.load(tensors(3.0))
    assert caught.value.peer is LocalPart.ENGINE


def test_a_parameter_that_the_loader_does_not_name_is_an_error() -> None:
    model = Model()
    model.skip = {"layers.1.bias"}
    reloader = Reloader(model, model.reload, model.finish)
    with pytest.raises(ModelError, match=r"has not loaded layers\.1\.bias \(1 such parameters\)"):
        reloader.load(tensors(1.0))
    model.skip = set()
    with pytest.raises(ModelError, match=r"has not loaded layers\.0\.weight \(2 such"):
        reloader.load(tensors(1.0, names=NAMES[2:]))


def test_a_parameter_that_vllm_makes_from_others_need_not_be_loaded() -> None:
    model = Model()
    with traced(model, {}, model_type=""):
        model.derived = nn.Parameter(torch.zeros(2))
    Reloader(model, model.reload, model.finish).load(tensors(1.0))
    assert {float(model.get_parameter(name).detach().mean()) for name in NAMES} == {1.0}


def test_weight_loaders_without_a_name_get_one_before_a_reload() -> None:
    """vLLM's reload asks each loader for its name, and a partial function has none."""
    model = Model()
    loader = model.layers[0].weight.weight_loader = functools.partial(nn.Linear.forward, 1)
    Reloader(model, model.reload, model.finish).load(tensors(1.0))
    assert loader.__name__ == "forward"


def test_a_loader_that_says_nothing_is_an_error() -> None:
    model = Model()
    model.says = False
    with pytest.raises(ModelError, match=r"Model\.load_weights does not say which parameters"):
        Reloader(model, model.reload, model.finish).load(tensors(1.0))


def test_names_of_the_learners_tensors_come_from_the_configuration() -> None:
    shapes = learner_shapes(tiny_config("glm4"))
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (96, 32)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert learner_shapes(AutoConfig.for_model("clip_vision_model")) == {}


def test_transposed_experts_are_named_one_by_one_as_views() -> None:
    """As vLLM's loader takes Llama 4's, besides the stacks of its checkpoints."""
    config = tiny_config("llama4_text")
    model = AutoModelForCausalLM.from_config(config)
    learners = dict(model.named_parameters())
    assert {name: tuple(tensor.shape) for name, tensor in learners.items()} == learner_shapes(config)
    tensors = dict(checkpoint_tensors(learners.items(), model_type="llama4_text", keeps_stacks=True))
    layer = "model.layers.1.feed_forward"
    stack, width = learners[f"{layer}.experts.gate_up_proj"], config.intermediate_size
    assert torch.equal(tensors[f"{layer}.experts.2.gate_proj.weight"], stack[2, :, :width].T)
    assert torch.equal(tensors[f"{layer}.experts.2.up_proj.weight"], stack[2, :, width:].T)
    down = tensors[f"{layer}.experts.3.down_proj.weight"]
    assert torch.equal(down, learners[f"{layer}.experts.down_proj"][3].T)
    assert down.data_ptr() == learners[f"{layer}.experts.down_proj"][3].data_ptr()
    assert f"{layer}.shared_expert.gate_proj.weight" in tensors
    assert not any(".experts.gate_up_proj" in name for name in tensors)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "minimax_m2"])
def test_stacked_experts_become_the_tensors_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """As transformers writes them: what vLLM's loader knows."""
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    learners = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name.endswith(corrections.BUFFER):
            buffer.normal_()
            parts = corrections.split(buffer).bfloat16()  # as a push may round them
            learners[name.removesuffix(corrections.BUFFER) + corrections.PARTS] = parts
    assert {name: tuple(tensor.shape) for name, tensor in learners.items()} == learner_shapes(model.config)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    tensors = dict(checkpoint_tensors(learners.items(), model_type=kind))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_stacks_that_a_checkpoint_has_too_are_named_expert_by_expert() -> None:
    """As vLLM's loader for gpt-oss takes them; others it would copy past its own reload."""
    bias = torch.arange(6.0).view(3, 2)
    learners = {"a.mlp.experts.down_proj_bias": bias, "a.self_attn.sinks": torch.ones(4)}
    named = dict(checkpoint_tensors(learners.items(), model_type="gpt_oss"))
    assert list(named) == [*(f"a.mlp.experts.{row}.down_proj_bias" for row in range(3)), "a.self_attn.sinks"]
    assert torch.equal(named["a.mlp.experts.2.down_proj_bias"], bias[2])


def test_stacks_that_are_to_stay_whole_are_named_as_the_engines_parameters_are() -> None:
    """vLLM 0.24 takes gpt-oss's so, and no single experts."""
    learners = {"a.mlp.experts.down_proj": torch.ones(3, 2, 4), "a.self_attn.sinks": torch.ones(4)}
    named = dict(checkpoint_tensors(learners.items(), model_type="gpt_oss", keeps_stacks=True))
    assert named.keys() == {"a.mlp.experts.routed_experts.down_proj", "a.self_attn.sinks"}
    split = dict(checkpoint_tensors(learners.items(), model_type="qwen3_moe", keeps_stacks=True))
    assert "a.mlp.experts.2.down_proj.weight" in split
