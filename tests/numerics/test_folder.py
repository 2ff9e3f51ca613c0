"""Model folders: the same as transformers writes, file by file, with little of the model in memory."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.architectures import model_class
from paceline.learner.model.folder import write_folder, write_from_ranks
from paceline.learner.model.loading import (
    Precision,
    check_stored,
    load_critic,
    load_policy,
    read_config,
    stored_tensors,
)
from paceline.learner.model.self_test import check_models
from paceline.models.facts import ARCHITECTURES
from paceline.storage.weight_files import INDEX
from paceline.weights import corrections
from support.architectures import tiny_config
from support.learner_fakes import run_config
from support.source import ROOT

pytestmark = pytest.mark.torch


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(kind)
    config.dtype = torch.float32
    return model_class(config).from_config(config)


def learners_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    buffers = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        correction = name.removesuffix(".weight") + corrections.BUFFER
        if correction in buffers:
            parts = correction.removesuffix(corrections.BUFFER) + corrections.PARTS
            yield parts, corrections.split(buffers[correction].normal_())


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_folder_in_many_files_is_what_transformers_writes_in_one(kind: str, tmp_path: Path) -> None:
    model, source, out = model_of(kind), tmp_path / "source", tmp_path / "out"
    model.config.save_pretrained(source)
    write_folder(out, learners_tensors(model), source=source, file_bytes=4096)
    model.save_pretrained(source)
    ours, theirs = stored(out), stored(source)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == theirs.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in theirs.values())
    assert {*index["weight_map"].values()} == {file.name for file in out.glob("*.safetensors")}
    own = {"topk_method", "scoring_func"}  # of DeepSeek-V3
    trees = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (out, source)]
    assert trees[0] | dict.fromkeys(own) == trees[1] | dict.fromkeys(own)
    assert (out / "generation_config.json").read_text() == (source / "generation_config.json").read_text()


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


def changed_folder(out: Path, kind: str = "qwen3", **tensors: Tensor) -> Path:
    """A tiny model's folder with further tensors, or others in their place."""
    model = model_of(kind)
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
    """Stores projections in block FP8, their scales in another file; returns the numbers that are meant."""
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
        plain[name] = (second[name].float() * blocks).bfloat16()
    names = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_the_program_of_the_docs_makes_a_bfloat16_copy_of_block_fp8(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, copy = changed_folder(Path("MODEL"), kind), Path("COPY")
    (folder / "tokenizer.json").write_text("{}")
    # Blocks at the edges are cut off.
    expected = to_block_fp8(folder, 24, 40)
    with pytest.raises(ModelError, match="is quantised"):
        load_policy(folder, ranks, FLOAT32)
    program = re.search(
        r"## Quantised checkpoints.*?```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL
    )
    assert program is not None
    exec(program[1], {})
    load_policy(copy, ranks, FLOAT32)
    copied = stored(copy)
    assert copied.keys() == expected.keys()
    for name, tensor in copied.items():
        assert torch.equal(tensor, expected[name]), name
    assert (copy / "tokenizer.json").read_text() == "{}"


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
