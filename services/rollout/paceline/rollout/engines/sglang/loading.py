"""The general path into SGLang's model: full tensors through its own loader, and a check that all arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import ModelError
from paceline.rollout.engines.weights.checkpoint import checkpoint_tensors
from paceline.rollout.engines.weights.trace import parameter_places, recall, written_by

Tensors = Iterator[tuple[str, Tensor]]


def load_full(
    model: Any, model_type: str, reload: Callable[[Tensors], None] | None = None
) -> Callable[[Tensors], None]:
    """Returns a function that loads full tensors, named as in a live Hugging Face model, into `model`.

    Args:
        model_type: as in the model's config.json.
        reload: loads checkpoint tensors and takes SGLang's steps after loading; by default the model's
            `load_weights`.

    The returned function raises ModelError if the loader did not write a parameter, or moved one to another
    address, because captured graphs read the old address.
    """

    def load(tensors: Tensors) -> None:
        before, writes = parameter_places(model), _Writes()
        with writes:
            (reload or model.load_weights)(checkpoint_tensors(tensors, model_type=model_type))
        if parameter_places(model) != before:
            raise ModelError(
                f"SGLang's loader has moved parameters of {type(model).__name__}: its captured graphs would "
                "read the old ones; choose another rollout.name for this model"
            )
        _check_complete(model, writes.storages)

    return load


@torch.no_grad()
def refresh_copies(model: torch.nn.Module) -> None:
    """Updates the copies of weights that SGLang keeps; graphs read them where they are.

    These are, seen in 0.5.16, the routers of its GLM models in float32, from a model's first step on; and the
    two halves of latent attention's `kv_b_proj`, which the models' `post_load_weights` makes.
    """
    make_halves: Any = getattr(model, "post_load_weights", None)
    if make_halves is not None:
        make_halves()
    for module in model.modules():
        copy = getattr(module, "_weight_fp32", None)
        if copy is not None:
            copy.copy_(module.weight)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Notes the storages that operators write to, in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.storages |= {x.untyped_storage().data_ptr() for x in written_by(func, args, kwargs)}
        return func(*args, **kwargs)


def _check_complete(model: torch.nn.Module, written: set[int]) -> None:
    trace = recall(model)
    computed = set() if trace is None else trace.made
    missing = [
        name
        for name, parameter in model.named_parameters()
        if name not in computed and parameter.untyped_storage().data_ptr() not in written
    ]
    if missing:
        raise ModelError(
            f"SGLang's loader has not written {missing[0]} ({len(missing)} such parameters), as far as can "
            "be seen: the learner's tensors do not fill the engine's model; choose another rollout.name"
        )
