"""The general path into vLLM's model: full tensors through its own loader, with a check that all were loaded.

vLLM reloads layer by layer: it moves a layer's parameters aside, collects its weights, and writes them into
the parameters' old storage when they are complete. An interrupted reload leaves layers incomplete, and the
next reload would silently add its weights to them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ModelError, PeerLostError
from paceline.core.members import LocalPart
from paceline.rollout.engines.weights.checkpoint import checkpoint_tensors
from paceline.rollout.engines.weights.trace import Places, parameter_places, recall

Tensors = Iterator[tuple[str, torch.Tensor]]


class Reloader:
    """Loads a complete set of full tensors into a live model; after a failure it restores the loader's state.

    Args:
        reload: vLLM's loading of checkpoint tensors in place; it must call `model.load_weights` once.
        finish: vLLM's end of a reload: puts every layer's parameters back and forgets the collected weights.
        model_type: as in the model's config.json.
    """

    def __init__(
        self,
        model: nn.Module,
        reload: Callable[[Tensors], None],
        finish: Callable[[], None],
        *,
        model_type: str = "",
    ) -> None:
        self._model, self._reload, self._finish = model, reload, finish
        self._model_type = model_type
        self._is_broken = False

    def load(self, tensors: Tensors) -> None:
        """Loads the tensors, which are named as in a live Hugging Face model.

        Raises:
            ModelError: the loader did not load every parameter of the model.
            PeerLostError: an earlier load broke off and its state could not be undone; restart the engine.
        """
        if self._is_broken:
            raise _broken()
        _name_weight_loaders(self._model)
        before = parameter_places(self._model)  # must not change, since a reload writes into the old storage
        with _recorded(self._model) as returned:
            try:
                self._reload(checkpoint_tensors(tensors, model_type=self._model_type))
            except BaseException:
                self._restore(before)
                raise
        self._is_broken = parameter_places(self._model) != before
        if self._is_broken:
            raise _broken()
        _check_complete(self._model, returned)

    def _restore(self, before: Places) -> None:
        """Ends an interrupted reload: values are a mixture, but the next reload begins with clean layers."""
        self._is_broken = True
        with contextlib.suppress(Exception):
            self._finish()
            self._is_broken = parameter_places(self._model) != before


@contextlib.contextmanager
def _recorded(model: Any) -> Iterator[list[Iterable[str] | None]]:
    """Records what `model.load_weights` returns, because vLLM's reload only logs what is missing."""
    load, returned = model.load_weights, list[Iterable[str] | None]()

    def recording(*args: Any, **kwargs: Any) -> Any:
        returned.append(load(*args, **kwargs))
        return returned[-1]

    model.load_weights = recording
    try:
        yield returned
    finally:
        del model.load_weights


def _name_weight_loaders(model: nn.Module) -> None:
    """Gives weight loaders that are partial functions a name, which vLLM's reload (0.32) requires.

    MiniMax-M2's norms of queries and keys have such loaders.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _check_complete(model: nn.Module, returned: list[Iterable[str] | None]) -> None:
    if len(returned) != 1 or returned[0] is None:
        raise ModelError(
            f"{type(model).__name__}.load_weights does not say which parameters it has loaded, so it is "
            "unknown whether a push has reached all of them; this model cannot be pushed into"
        )
    trace = recall(model)
    loaded = set(returned[0]) | (set() if trace is None else trace.made)
    missing = [name for name, _ in model.named_parameters() if name not in loaded]
    if missing:
        raise ModelError(
            f"vLLM's loader has not loaded {missing[0]} ({len(missing)} such parameters): the learner's "
            "tensors do not fill the engine's model"
        )


def _broken() -> PeerLostError:
    return PeerLostError(
        "a load of full tensors was interrupted and left the engine's loader incomplete; restart the engine",
        peer=LocalPart.ENGINE,
    )
