"""Model folders: the same as transformers writes, file by file, with little of the model in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.architectures import model_class
from paceline.learner.model.folder import write_folder, write_from_ranks
from paceline.learner.model.loading import (
    Precision,
    check_stored,
    hugging_face_names,
    load_critic,
    load_policy,
    read_config,
    stored_tensors,
)
from paceline.learner.model.quantised import mxfp4
from paceline.learner.model.self_test import check_models
from paceline.learner.model.tensor_files import ModelFiles
from paceline.models.facts import ARCHITECTURES, family_of
from paceline.storage.weight_files import INDEX
from paceline.weights import corrections
from support.architectures import tiny_config
from support.learner_fakes import run_config
from support.source import ROOT

pytestmark = pytest.mark.torch


def model_of(kind: str, **changes: int) -> Any:
    torch.manual_seed(0)
    config = tiny_config(kind, **changes)
    config.dtype = torch.float32
    return model_class(config).from_config(config)


def learners_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    buffers = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        factor = name.removesuffix(".input_layernorm.weight") + corrections.FACTOR
        if factor in buffers:
            yield factor, buffers[factor]
        for owner in (name.removesuffix(".weight"), name.removesuffix(".gate.weight")):
            if owner + corrections.BUFFER in buffers:
                correction = buffers[owner + corrections.BUFFER]
                yield owner + corrections.PARTS, corrections.split(correction.normal_())


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_folder_in_many_files_is_what_transformers_writes_in_one(kind: str, tmp_path: Path) -> None:
    model, source, out = model_of(kind), tmp_path / "source", tmp_path / "out"
    model.config.save_pretrained(source)
    write_folder(out, learners_tensors(model), source=source, file_bytes=4096)
    model.save_pretrained(source)
    ours, theirs = stored(out), stored(source)
    if kind == "qwen3_vl_moe":  # as published; transformers writes what engines do not read
        theirs |= {name: value.transpose(1, 2) for name, value in theirs.items() if ".mlp.experts." in name}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == theirs.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in theirs.values())
    assert {*index["weight_map"].values()} == {file.name for file in out.glob("*.safetensors")}
    own = {key for key, _ in family_of(kind).keys_for_engines}
    trees = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (out, source)]
    for tree in trees:
        tree.get("text_config", {}).pop("norm_topk_prob", None)  # of Qwen3-VL-MoE
    assert trees[0] | dict.fromkeys(own) == trees[1] | dict.fromkeys(own)
    assert (out / "generation_config.json").read_text() == (source / "generation_config.json").read_text()


def test_experts_that_transformers_did_not_transpose_are_read_too(tmp_path: Path, ranks: Ranks) -> None:
    model = model_of("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    ours: Any = dict(hugging_face_names(load_policy(tmp_path, ranks, FLOAT32)))
    for name, value in model.named_parameters():
        assert torch.equal(ours[name].full_tensor(), value), name


@pytest.mark.parametrize("inner", [24, 16])
def test_transposed_experts_are_read_as_transformers_reads_them(
    tmp_path: Path, ranks: Ranks, inner: int
) -> None:
    """With an inner size of 16 they are square, and transformers no longer sees that they are transposed."""
    model = model_of("qwen3_vl_moe", moe_intermediate_size=inner)
    model.config.save_pretrained(tmp_path / "source")
    write_folder(tmp_path / "out", learners_tensors(model), source=tmp_path / "source")
    text = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["text_config"]
    assert text["norm_topk_prob"] is True  # without it engines would not divide by the weights' sum
    theirs: Any = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours: Any = dict(hugging_face_names(load_policy(tmp_path / "out", ranks, FLOAT32)))
    for name, value in model.named_parameters():
        assert torch.equal(ours[name].full_tensor(), value), name
        if inner == 24:
            assert torch.equal(theirs.get_parameter(name), value), name


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    model = model_of("llama")
    model.config.save_pretrained(tmp_path / "source")
    write_folder(tmp_path / "out", learners_tensors(model), source=tmp_path / "source")
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_at_most_a_file_and_a_layer_are_in_memory(tmp_path: Path) -> None:
    model = model_of("llama")
    model.config.save_pretrained(tmp_path / "source")
    live, most = 0, 0

    def gone(num_bytes: int) -> None:
        nonlocal live
        live -= num_bytes

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal live, most
        for name, value in learners_tensors(model):
            copy = value.clone()
            live += copy.nbytes
            most = max(most, live)
            weakref.finalize(copy, gone, copy.nbytes)
            yield name, copy
            del copy

    layer = sum(value.nbytes for value in model.model.layers[0].parameters())
    largest = max(layer, model.lm_head.weight.nbytes)
    total = sum(value.nbytes for value in model.parameters())
    assert 2 * largest + 4096 < total
    write_folder(tmp_path / "out", tensors(), source=tmp_path / "source", file_bytes=4096)
    assert 0 < most <= 2 * largest + 4096


def test_tensors_that_do_not_fit_the_model_leave_no_folder_that_loads(tmp_path: Path) -> None:
    model = model_of("llama")
    model.config.save_pretrained(tmp_path / "source")
    missing = [pair for pair in learners_tensors(model) if "layers.1.mlp.up_proj" not in pair[0]]
    other = [*learners_tensors(model), ("model.layers.9.mlp.up_proj.weight", torch.ones(2))]
    for number, tensors in enumerate((missing, other)):
        out = tmp_path / f"out{number}"
        with pytest.raises(ModelError, match=r"1 tensors do not fit .*up_proj.weight"):
            write_folder(out, tensors, source=tmp_path / "source", file_bytes=4096)
        assert not (out / "config.json").exists()


def test_a_rank_that_cannot_write_goes_on_gathering(ranks: Ranks, tmp_path: Path) -> None:
    """The others wait for it in every tensor."""
    model_of("llama").save_pretrained(tmp_path)
    network = load_policy(tmp_path, ranks, Precision(compute=torch.float32))
    gathered: list[str] = []

    def write(tensors: Any) -> None:
        gathered.append(next(iter(tensors))[0])
        raise OSError("the disk is full")

    count = 0
    full_tensor = torch.distributed.tensor.DTensor.full_tensor

    def counting(self: Any, **arguments: Any) -> Tensor:
        nonlocal count
        count += 1
        return full_tensor(self, **arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="the disk is full"):
        patch.setattr(torch.distributed.tensor.DTensor, "full_tensor", counting)
        write_from_ranks(network, ranks, write)
    assert count == len(list(network.parameters()))


FLOAT32 = Precision(compute=torch.float32)


QUANTISABLE = {"hidden_size": 64, "intermediate_size": 96}
"""Matrices of whole blocks of 32 numbers"""


def changed_folder(
    out: Path, kind: str = "qwen3", config: Mapping[str, int] = MappingProxyType({}), **tensors: Tensor
) -> Path:
    """A tiny model's folder with further tensors, or others in their place."""
    model = model_of(kind, **config)
    model.save_pretrained(out)
    save_file({**stored(out), **tensors}, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("part", ["", "text_config"])
def test_a_quantised_model_is_refused_by_all_that_load_one(ranks: Ranks, tmp_path: Path, part: str) -> None:
    folder = changed_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (config.setdefault(part, {}) if part else config)["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    for load in LOADS:
        with pytest.raises(ModelError, match=r"is quantised: .*\(fp8\)\. .*bfloat16 copy.*docs/models.md"):
            load(folder, ranks)


LOADS = (
    lambda folder, ranks: load_policy(folder, ranks, FLOAT32),
    lambda folder, ranks: load_policy(folder, ranks, FLOAT32, random_seed=1),
    lambda folder, ranks: load_critic(folder, ranks, FLOAT32, seed=1),
    lambda folder, ranks: list(stored_tensors(folder)),
    lambda folder, ranks: check_stored(folder, needs_head=True),
    lambda folder, ranks: read_config(folder),
)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_a_tensor_of_another_type_is_refused(ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    values = stored(changed_folder(tmp_path / "plain"))[name]
    folder = changed_folder(tmp_path / "model", **{name: values.to(dtype)})
    for load in LOADS:
        with pytest.raises(ModelError, match=r"up_proj.weight' is stored as (F8_E4M3|I8|F64); float32"):
            load(folder, ranks)
    half = changed_folder(tmp_path / "half", **{name: values.half()})
    assert torch.equal(dict(stored_tensors(half))[name], values.half())


def to_block_fp8(folder: Path, rows: int, columns: int) -> dict[str, Tensor]:
    """Stores projections in block FP8, their scales in another file; returns the numbers that are meant.

    Those are in float32.
    """
    plain = stored(folder)
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if "_proj" not in name:
            first[name] = tensor
            continue
        number = (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
        scale = torch.rand(number, generator=torch.Generator().manual_seed(1)) + 0.5
        blocks = torch.kron(scale, torch.ones(rows, columns))[: tensor.shape[0], : tensor.shape[1]]
        second[name], first[f"{name}_scale_inv"] = (tensor.float() / blocks).to(torch.float8_e4m3fn), scale
        plain[name] = second[name].float() * blocks
    names = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def to_mxfp4(folder: Path) -> None:
    """Stores experts in MXFP4: any bytes are numbers, with scales of 2 ** -7 to 1."""
    draws, tensors = torch.Generator().manual_seed(0), stored(folder)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inner, outer = tensors.pop(name).shape
        grid = (num_experts, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*grid, 16), generator=draws, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 128, grid, generator=draws, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_the_program_of_the_docs_makes_a_bfloat16_copy_of_block_fp8(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, copy = changed_folder(Path("MODEL"), kind), Path("COPY")
    (folder / "tokenizer.json").write_text("{}")
    # Blocks at the edges are cut off.
    expected = to_block_fp8(folder, 24, 40)
    for name, parameter in hugging_face_names(load_policy(folder, ranks, FLOAT32)):
        if name in expected:
            assert torch.equal(parameter.full_tensor(), expected[name]), name
    program = ROOT / "examples" / "quantised" / "bfloat16_copy.py"
    subprocess.run([sys.executable, program, folder, copy], check=True, timeout=120)
    load_policy(copy, ranks, FLOAT32)
    copied = stored(copy)
    assert copied.keys() == expected.keys()
    for name, tensor in copied.items():
        meant = expected[name].bfloat16() if "_proj" in name else expected[name]
        assert torch.equal(tensor, meant), name
    assert (copy / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_block_fp8_is_read_as_transformers_dequantises_it(tmp_path: Path, kind: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    plain = changed_folder(tmp_path / "model", kind)
    to_block_fp8(plain, 8, 16)
    dequantise = Fp8Dequantize(None)._dequantize_one
    wanted, files = {}, stored(plain)
    for name, tensor in files.items():
        if (scales := files.get(f"{name}_scale_inv")) is not None:
            tensor = dequantise(tensor, scales, torch.float32)
        if not name.endswith("_scale_inv"):
            wanted[name] = tensor
    name = "model.layers.1.self_attn.o_proj.weight"
    some = ModelFiles(plain).rows(name, wanted[name].shape)(5, 18)  # as a rank reads: from within a block
    assert torch.equal(some, wanted[name][5:18])
    tensors = dict(stored_tensors(plain))
    write_folder(tmp_path / "out", tensors.items(), source=plain)
    written = stored(tmp_path / "out")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in written.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_experts_in_mxfp4_are_read_expert_by_expert(ranks: Ranks, tmp_path: Path) -> None:
    """Of a byte the low half comes first; a scale is an exponent with a bias of 127."""
    folder = changed_folder(tmp_path / "model", "gpt_oss", config=QUANTISABLE)
    to_mxfp4(folder)
    files = stored(folder)
    network = load_policy(folder, ranks, FLOAT32)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    for name, parameter in hugging_face_names(network):
        if name in files:
            assert torch.equal(parameter.full_tensor(), files[name]), name
            continue
        blocks, scales = files[f"{name}_blocks"].long(), files[f"{name}_scales"].float() - 127
        pairs = torch.stack([values[blocks % 16], values[blocks // 16]], dim=-1).flatten(-2)
        wanted = (pairs * 2 ** scales.unsqueeze(-1)).flatten(-2).transpose(1, 2)
        assert torch.equal(parameter.full_tensor(), wanted), name
        assert torch.equal(ModelFiles(folder).rows(name, wanted.shape)(1, 3).float(), wanted[1:3])


def test_each_byte_and_each_exponent_of_mxfp4_is_transformers_number(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(255, 1, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).repeat(1, 1, 16)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        slices = [file.get_slice(f"w_{part}") for part in ("blocks", "scales")]
        read = mxfp4("w", slices[0], slices[1], torch.Size((255, 512, 1)))
        numbers = torch.cat([read(0, 100), read(100, 255)])
    assert torch.equal(numbers, convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        (
            "_scale_inv",
            r"up_proj.weight_scale_inv has shape \(1, 1\); 48 x 32 numbers in blocks of 8 x 16 need",
        ),
        ("", r"q_proj.weight' is stored as F8_E4M3 without the scales of block FP8"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, suffix: str, reason: str) -> None:
    folder = changed_folder(tmp_path / "model")
    to_block_fp8(folder, 8, 16)
    tensors = load_file(folder / "a.safetensors")
    if suffix:
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    else:
        del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    save_file(tensors, folder / "a.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "a.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=reason):
        check_stored(folder, needs_head=True)


UNREAD = ("model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight", "model.extra")


@pytest.mark.parametrize("name", UNREAD)
def test_tensors_that_the_model_lacks_are_refused_by_name(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = changed_folder(tmp_path / "model", **{name: torch.ones(4)})
    for load in (*LOADS[:1], *LOADS[2:5]):
        with pytest.raises(ModelError, match=rf"that the model of its config.json lacks \(1\): {name}"):
            load(folder, ranks)


def test_a_short_list_of_tensors_may_be_left_out(ranks: Ranks, tmp_path: Path) -> None:
    harmless = ("model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight", "value_head.bias")
    folder = changed_folder(tmp_path / "model", **{name: torch.ones(4) for name in harmless})
    load_policy(folder, ranks, FLOAT32)
    first = tiny_config("deepseek_v3").num_hidden_layers
    name = f"model.layers.{first}.self_attn.o_proj.weight"
    folder = changed_folder(tmp_path / "further", "deepseek_v3", **{name: torch.ones(4)})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    load_policy(folder, ranks, FLOAT32)
    config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"lacks \(1\): model.layers.{first}.self_attn"):
        load_policy(folder, ranks, FLOAT32)

    further = {"mtp.norm.weight": torch.ones(4)}
    load_policy(changed_folder(tmp_path / "next", "qwen3_next", **further), ranks, FLOAT32)
    with pytest.raises(ModelError, match=r"lacks \(1\): mtp.norm.weight"):
        load_policy(changed_folder(tmp_path / "other", **further), ranks, FLOAT32)


def test_keys_of_layers_that_take_those_of_earlier_ones_may_be_left_out(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 have them; of other layers they would be missed."""
    first = "model.layers.2.self_attn.k_norm.weight"
    check_stored(changed_folder(tmp_path / "a", "gemma4_text", **{first: torch.ones(8)}), needs_head=True)
    own = "model.layers.1.self_attn.v_proj.weight"  # that layer's values are its keys
    folder = changed_folder(tmp_path / "b", "gemma4_text", **{own: torch.ones(16, 32)})
    with pytest.raises(ModelError, match=rf"lacks \(1\): {own}"):
        check_stored(folder, needs_head=True)


def test_a_head_is_left_out_where_the_network_has_none(ranks: Ranks, tmp_path: Path) -> None:
    folder = changed_folder(tmp_path / "untied", **{"lm_head.bias": torch.ones(4)})
    with pytest.raises(ModelError, match=r"lacks \(1\): lm_head.bias"):
        load_policy(folder, ranks, FLOAT32)
    load_critic(folder, ranks, FLOAT32, seed=1)
    check_stored(folder, needs_head=False)


@pytest.mark.parametrize("critic", [False, True])
def test_the_check_of_a_run_looks_at_what_is_stored(tmp_path: Path, critic: bool) -> None:
    plain = changed_folder(tmp_path / "plain")
    folder = changed_folder(tmp_path / "model", **{UNREAD[0]: torch.ones(4)})
    paths = (plain, folder) if critic else (folder, plain)
    sections: dict[str, Any] = {"critic": {"path": str(paths[1])}}
    with pytest.raises(ModelError, match=r"lacks \(1\): .*q_proj.bias"):
        check_models(run_config(paths[0], **sections))
    teacher: dict[str, Any] = {"adv_estimator": "my.py:f", "networks": {"teacher": str(folder)}}
    with (
        mock.patch("paceline.learner.model.self_test.check_frozen_networks") as checked,
        pytest.raises(ModelError, match=r"lacks \(1\): .*q_proj.bias"),
    ):
        check_models(run_config(plain, algorithm=teacher))
    assert checked.called
    if not critic:
        headless = {name: value for name, value in stored(plain).items() if name != "lm_head.weight"}
        save_file(headless, plain / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="has no tensor 'lm_head.weight'"):
            check_models(run_config(plain, critic={"path": str(paths[0])}))
    sections["model"] = {"path": str(paths[0]), "load_format": "random"}
    assert len(check_models(run_config(paths[0], **sections))) == 2
