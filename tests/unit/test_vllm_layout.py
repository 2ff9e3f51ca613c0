"""Traced loading against layouts that were written down by hand, and what cannot be pushed in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.rollout.engines.weights.layout import describe_model
from paceline.rollout.engines.weights.trace import LoadTrace, recall, trace_load, traced
from paceline.weights.geometry.boxes import Box
from support.fake_vllm import fake_qwen2
from support.weight_layouts import DenseModel, tp_layout

pytestmark = pytest.mark.torch

Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[nn.Module, dict[str, Tensor]], object]


def dense(**changes: object) -> DenseModel:
    sizes = {
        "vocab_size": 199,
        "hidden": 12,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 3,
        "intermediate": 16,
        "layers": 2,
        "tied": False,
        "bias": True,
    }
    return DenseModel(**{**sizes, **changes})


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_the_trace_gives_the_expected_slices(size: int, kv_heads: int, tied: bool) -> None:
    model = dense(kv_heads=kv_heads, tied=tied)
    for rank in range(size):
        layout = describe_model(fake_qwen2(model, rank, size))
        expected, _ = tp_layout(model, rank, size)
        assert not layout.full_tensors
        assert layout.dtype == "float32"
        key = lambda part: (part.param, part.offset)  # noqa: E731
        assert sorted(layout.slices, key=key) == sorted(expected.slices, key=key)


def test_tracing_writes_padding_and_no_weight() -> None:
    fake = fake_qwen2(dense(), 1, 2)
    embedding = fake.get_parameter("model.embed_tokens.weight")
    assert embedding[199 - 128 :].eq(0).all()
    assert embedding[: 199 - 128].isnan().all()
    others = [param for name, param in fake.named_parameters() if "embed" not in name and "head" not in name]
    assert all(param.isnan().all() for param in others)


def test_a_parameter_that_is_not_loaded_sends_the_model_the_general_way() -> None:
    fake = fake_qwen2(dense(), 0, 2, moe=True)
    trace = recall(fake)
    assert trace is not None
    names = [f"model.layers.{layer}.mlp.experts.weight" for layer in range(2)]
    assert trace.reasons == dict.fromkeys(
        names, "its loading leaves a part of it unchanged, or writes a part twice"
    )
    layout = describe_model(fake)
    assert layout.full_tensors
    assert layout.slices == ()


def test_a_model_that_was_not_traced_takes_the_general_way() -> None:
    assert describe_model(nn.Linear(2, 2)).full_tensors


def test_a_weight_that_is_repacked_later_is_not_mistaken_for_a_live_one() -> None:
    fake = fake_qwen2(dense(), 0, 1)
    assert not describe_model(fake).full_tensors
    fake.get_parameter("model.layers.0.mlp.down_proj.weight").data = torch.empty(0)
    assert describe_model(fake).full_tensors


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_what_is_sent_has_the_short_type_of_a_model_that_keeps_some_parameters_in_float32(
    short: torch.dtype,
) -> None:
    fake = fake_qwen2(dense(), 0, 1, dtype=short)
    norm = fake.get_parameter("model.norm.weight")
    norm.data = norm.data.float()
    assert describe_model(fake).dtype == str(short).removeprefix("torch.")


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.float8_e4m3fn])
def test_other_mixtures_of_types_are_refused(kind: torch.dtype) -> None:
    fake = fake_qwen2(dense(), 0, 1, dtype=torch.bfloat16)
    norm = fake.get_parameter("model.norm.weight")
    norm.data = norm.data.to(kind)
    with pytest.raises(ModelError, match=r"bfloat16.*have one type"):
        describe_model(fake)


class Corrected(nn.Module):
    """Weights in bfloat16, and a correction of scores in float32, as vLLM keeps DeepSeek-V3's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_a_correction_of_scores_has_a_type_of_its_own_and_takes_the_general_way() -> None:
    model = Corrected()
    shapes = {"gate.weight": (4, 2), "gate.e_score_correction_parts": (4, 3)}
    with traced(model, shapes, model_type="deepseek_v3"):
        pass
    trace = recall(model)
    assert trace is not None
    assert trace.reasons.keys() == {"gate.e_score_correction_bias"}
    layout = describe_model(model)
    assert (layout.dtype, layout.full_tensors) == ("bfloat16", True)


class Experts(nn.Module):
    """Four experts in one parameter, (4, 6, 4); `load` gets the tensors by name."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6, 4), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Weights) -> None:
        self.load(self, dict(weights))


def trace_of(load: Load, **shapes: tuple[int, ...]) -> LoadTrace:
    return trace_load(Experts(load), shapes, model_type="")


def expert_by_expert(model: Any, tensors: dict[str, Tensor]) -> None:
    """Gate and up of every expert apart, rows 3 to 6 of each: what the second of two ranks needs."""
    for expert in range(4):
        for index, half in enumerate(tensors["fused"][expert].chunk(2)):
            model.weight.data[expert].narrow(0, 3 * index, 3).copy_(half.narrow(0, 3, 3))


def test_copies_of_single_experts_become_one_slice_per_projection() -> None:
    trace = trace_of(expert_by_expert, fused=(4, 12, 4))
    assert trace.reasons == {}
    assert [(part.box, part.offset) for part in trace.slices] == [
        (Box((0, 9, 0), (4, 12, 4)), (0, 3, 0)),
        (Box((0, 3, 0), (4, 6, 4)), (0, 0, 0)),
    ]


def transposed(model: Any, tensors: dict[str, Tensor]) -> None:
    """Rows 1 to 6 of each expert; the first ones come as they are."""
    for expert in range(4):
        model.weight.data[expert][1:].copy_(tensors["a"][expert, :, 2:7].t().contiguous())
    model.weight.data[:, :1].copy_(tensors["b"])


def test_a_transposed_copy_names_the_parameter_with_its_last_dimensions_swapped() -> None:
    trace = trace_of(transposed, a=(4, 4, 7), b=(4, 1, 4))
    assert trace.reasons == {}
    assert [(part.param, part.box, part.offset) for part in trace.slices] == [
        ("weight.mT", Box((0, 0, 2), (4, 4, 7)), (0, 0, 1)),
        ("weight", Box((0, 0, 0), (4, 1, 4)), (0, 0, 0)),
    ]


def one_expert_from_elsewhere(model: Any, tensors: dict[str, Tensor]) -> None:
    for expert in range(4):
        model.weight.data[expert].copy_(tensors["b" if expert == 1 else "a"][expert])


def test_parts_with_another_tensor_between_them_stay_apart() -> None:
    trace = trace_of(one_expert_from_elsewhere, a=(4, 6, 4), b=(4, 6, 4))
    assert trace.reasons == {}
    assert [(part.name, part.box.start[0], part.box.stop[0]) for part in trace.slices] == [
        ("a", 0, 1),
        ("a", 2, 4),
        ("b", 1, 2),
    ]


def test_types_devices_and_contiguity_do_not_hide_where_a_tensor_comes_from() -> None:
    trace = trace_of(
        lambda model, tensors: model.weight.data.copy_(
            tensors["a"].to("cpu").narrow(1, 2, 6).contiguous().to(torch.float32)
        ),
        a=(4, 9, 4),
    )
    assert trace.reasons == {}
    assert [part.box for part in trace.slices] == [Box((0, 2, 0), (4, 8, 4))]


def test_a_cast_to_a_wider_type_hides_nothing_either() -> None:
    model = Experts(lambda m, t: m.weight.data.copy_(t["a"].to(torch.float32)))
    weight = model._parameters.pop("weight")
    model.first, model.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)), weight
    assert trace_load(model, {"a": (4, 6, 4)}, model_type="").reasons.keys() == {"first"}


class SharesKeys(nn.Module):
    """As vLLM 0.24 has Gemma 4's layers that take keys and values of earlier ones."""

    is_kv_shared_layer = True
    q_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.k_norm = nn.Linear(3, 8, bias=False), nn.LayerNorm(2, bias=False)
        self.requires_grad_(False)

    def load_weights(self, weights: Weights) -> None:
        self.qkv_proj.weight.data[:4].copy_(dict(weights)["q"])


@pytest.mark.parametrize("is_shared", [True, False])
def test_keys_that_no_layer_reads_are_zeros_and_no_reason_against_a_push_in_place(is_shared: bool) -> None:
    model = SharesKeys()
    model.is_kv_shared_layer = is_shared
    trace = trace_load(model, {"q": (4, 3)}, model_type="gemma4_text")
    assert trace.reasons.keys() == (set() if is_shared else {"qkv_proj.weight", "k_norm.weight"})
    assert [(part.box, part.offset) for part in trace.slices] == [(Box((0, 0), (4, 3)), (0, 0))]
    assert model.k_norm.weight.eq(0).all() == model.qkv_proj.weight[4:].eq(0).all() == is_shared


def staged(model: Any, tensors: dict[str, Tensor]) -> None:
    buffer = torch.zeros(4, 6, 4)
    buffer.copy_(tensors["a"])
    model.weight.data.copy_(buffer)


def padded_after(model: Any, tensors: dict[str, Tensor]) -> None:
    model.weight.data.copy_(tensors["a"])
    model.weight.data[:, 5:].fill_(0)


def in_place(model: Any, tensors: dict[str, Tensor]) -> None:
    model.weight.data.copy_(tensors["a"])
    model.weight.data.add_(1)


def twice(model: Any, tensors: dict[str, Tensor]) -> None:
    model.weight.data.copy_(tensors["a"])
    model.weight.data[2:].copy_(tensors["a"][2:])


@pytest.mark.parametrize(
    ("load", "shape", "reason"),
    [
        (lambda m, t: m.weight.data.copy_(t["a"].mul_(2)), (4, 6, 4), "rearranged"),
        (lambda m, t: (t["a"][1:].zero_(), m.weight.data.copy_(t["a"])), (4, 6, 4), "rearranged"),
        (lambda m, t: m.weight.data[:, 1].copy_(t["a"][:, :, 0].T), (4, 4, 1), "rearranged"),
        (lambda m, t: m.weight.data.copy_(t["a"].transpose(0, 2)), (4, 6, 4), "rearranged"),
        (lambda m, t: m.weight.data.copy_(t["a"] + 1), (4, 6, 4), "rearranged"),
        (
            # As Llama 4's loader permutes the rows of queries and keys.
            lambda m, t: m.weight.data.copy_(t["a"].view(2, 2, 6, 4).transpose(0, 1).reshape(4, 6, 4)),
            (4, 6, 4),
            "rearranged",
        ),
        (lambda m, t: m.weight.data.copy_(t["a"].half()), (4, 6, 4), "rearranged"),
        (lambda m, t: m.weight.data.copy_(t["a"].view(4, 6, 4)), (24, 4), "rearranged"),
        (lambda m, t: m.weight.data.copy_(t["a"]), (1, 6, 4), "rearranged"),
        (lambda m, t: m.weight.data[1:].copy_(t["a"]), (3, 6, 4), "leaves a part"),
        (staged, (4, 6, 4), "computes it"),
        (in_place, (4, 6, 4), "computes it"),
        (padded_after, (4, 6, 4), "overwrites what it has loaded"),
        (twice, (4, 6, 4), "writes a part twice"),
        (
            lambda m, t: m.weight.data.fill_(t["a"].sum().item()),
            (4, 6, 4),
            r"cannot be traced \(RuntimeError",
        ),
    ],
)
def test_what_is_no_copy_of_a_box_is_not_pushed_in_place(
    load: Load, shape: tuple[int, ...], reason: str
) -> None:
    trace = trace_of(load, a=shape)
    assert list(trace.reasons) == ["weight"]
    assert re.search(reason, trace.reasons["weight"])


def after_processing(process: Callable[[Any], object]) -> dict[str, str]:
    model = Experts(lambda m, t: m.weight.data.copy_(t["a"]))
    with traced(model, {"a": (4, 6, 4)}, model_type=""):
        process(model)
    trace = recall(model)
    assert trace is not None
    return trace.reasons


def replaced(model: Any) -> None:
    model.weight = nn.Parameter(torch.zeros(4, 6, 4), requires_grad=False)


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (lambda m: m.weight.data.copy_(m.weight.data), None),
        (lambda m: setattr(m, "view", m.weight.data[0]), None),
        (lambda m: setattr(m, "workspace", torch.empty_like(m.weight)), None),
        (lambda m: torch.equal(m.weight, m.weight), None),
        (lambda m: setattr(m, "absorbed", m.weight.data @ torch.ones(4)), "kernel derives its own weights"),
        (lambda m: m.weight.data.copy_(m.weight.data.flip(0)), "kernel derives its own weights"),
        (replaced, "it is replaced"),
    ],
)
def test_what_a_kernel_makes_of_loaded_weights_is_seen(
    process: Callable[[Any], object], reason: str | None
) -> None:
    reasons = after_processing(process)
    assert (reason in reasons["weight"]) if reason else reasons == {}


def test_a_parameter_that_is_made_after_loading_is_known_as_one_that_no_checkpoint_has() -> None:
    """As vLLM makes `W_UV` of latent attention: no push brings it, and it is made again after each load."""
    model = Experts(lambda m, t: m.weight.data.copy_(t["a"]))
    with traced(model, {"a": (4, 6, 4)}, model_type=""):
        model.register_parameter("derived", nn.Parameter(torch.zeros(4, 4), requires_grad=False))
    trace = recall(model)
    assert trace is not None
    assert (trace.made, set(trace.reasons)) == ({"derived"}, {"derived"})


def late(model: Any, tensors: dict[str, Tensor]) -> None:
    model.weight.data.copy_(tensors["a"])
    model.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.bias.data.copy_(tensors["b"])


def test_a_parameter_that_is_made_while_it_is_loaded_is_traced() -> None:
    trace = trace_of(late, a=(4, 6, 4), b=(3,))
    assert trace.reasons == {}
    assert {part.param for part in trace.slices} == {"weight", "bias"}
