"""Model folders: the same as transformers writes, file by file, with little of the model in memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.architectures import ARCHITECTURES, model_class
from paceline.learner.model.folder import write_folder, write_from_ranks
from paceline.learner.model.loading import Precision, load_policy
from paceline.weights import corrections
from support.architectures import tiny_config

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
