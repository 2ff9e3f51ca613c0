"""The index of a model's parameters, and the cache that notices when they have moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.core.errors import ModelError
from paceline.weights.geometry.parameters import AddressCache, ParameterIndex


def test_the_index_gives_what_the_model_holds_now_each_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.Embedding(2, 3)))
    model[1][1].weight = model[0].weight  # tied
    index = ParameterIndex(model)
    assert list(index.current()) == [name for name, _ in model.named_parameters()]
    model[1][0].weight = nn.Parameter(torch.ones(2, 3))
    assert {name: id(parameter) for name, parameter in index.current().items()} == {
        name: id(parameter) for name, parameter in model.named_parameters()
    }
    del model[0].bias
    with pytest.raises(ModelError, match=r"0\.bias: the model has lost this parameter"):
        index.current()


def test_a_cached_value_is_rebuilt_only_when_tensors_moved() -> None:
    made: list[int] = []
    cache = AddressCache[int]()

    def get(*tensors: torch.Tensor) -> int:
        return cache.get(tensors, lambda: made.append(len(made)) or made[-1])

    first, second = torch.zeros(4), torch.zeros(4)
    assert get(first, second) == get(first.view(2, 2), second) == 0
    assert get(second, first) == 1
    cache.clear()
    assert get(second, first) == 2
    assert made == [0, 1, 2]
