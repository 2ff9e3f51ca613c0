"""A model's parameters in every push anew: where they are kept, and what was prepared for where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import nn

from paceline.core.errors import ModelError

T = TypeVar("T")


class ParameterIndex:
    """The parameters by name, each once, as `named_parameters` gives them; that walks all modules, which takes milliseconds.

    Args:
        model: no modules may be added to it or taken away while the index is used; parameters may be replaced by others.
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
        """The parameters as they are now; ModelError where one was taken away."""
        found = {name: held.get(kind) for name, (held, kind) in self._places.items()}
        gone = [name for name, parameter in found.items() if parameter is None]
        if gone:
            raise ModelError(
                f"{gone[0]}: the model has lost this parameter since it was described; form the weight group anew"
            )
        return {name: parameter for name, parameter in found.items() if parameter is not None}


class Prepared(Generic[T]):
    """Something that was made for certain addresses in memory, and is made anew where tensors have moved."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[int, ...], T] | None = None

    def get(self, tensors: Iterable[torch.Tensor], make: Callable[[], T]) -> T:
        """What was made for these tensors, now or before."""
        places = tuple(tensor.data_ptr() for tensor in tensors)
        if self._kept is None or self._kept[0] != places:
            self._kept = places, make()
        return self._kept[1]

    def forget(self) -> None:
        """Next time it is made anew."""
        self._kept = None
