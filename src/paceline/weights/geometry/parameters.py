"""Finds a model's parameters quickly in every push; caches notice when a parameter has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

import torch
from torch import nn

from paceline.core.errors import ModelError
from paceline.weights.geometry.boxes import Box

T = TypeVar("T")

TRANSPOSED: Final = ".mT"
"""Ending of a slice's parameter name if the parameter has the tensor's last two dimensions swapped."""


def tensor_of(parameters: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns the parameter that a slice names; see `TRANSPOSED`."""
    own = name.removesuffix(TRANSPOSED)
    values = parameters[own].detach()
    return values if own == name else values.mT


def part_of(parameters: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    """Returns the view of a parameter that a slice names, of the box's shape."""
    return tensor_of(parameters, name)[box.slices]


class ParameterIndex:
    """Looks up parameters by name, each once, as `named_parameters` gives them.

    Avoids that function's walk over all modules, which takes milliseconds.

    Args:
        model: the model; it may replace parameters but not add or remove modules while the index is used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, nn.Parameter | None], str]] = {}
        seen: set[int] = set()
        for path, module in model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._places[f"{path}.{kind}" if path else kind] = module._parameters, kind

    def current(self) -> dict[str, nn.Parameter]:
        """Returns the parameters as they are now; raises ModelError if one has been removed."""
        parameters: dict[str, nn.Parameter] = {}
        for name, (owner, kind) in self._places.items():
            parameter = owner.get(kind)
            if parameter is None:
                raise ModelError(
                    f"{name}: the model has lost this parameter since it was described; "
                    "form a new weight group"
                )
            parameters[name] = parameter
        return parameters


class AddressCache(Generic[T]):
    """Caches a value that holds tensors' addresses, such as a copy table; rebuilt when a tensor moves."""

    def __init__(self) -> None:
        self._entry: tuple[tuple[int, ...], T] | None = None

    def get(self, tensors: Iterable[torch.Tensor], make: Callable[[], T]) -> T:
        """Returns the cached value, or a new one if the addresses of `tensors` have changed."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if self._entry is None or self._entry[0] != addresses:
            self._entry = addresses, make()
        return self._entry[1]

    def clear(self) -> None:
        """Drops the cached value, if any."""
        self._entry = None
