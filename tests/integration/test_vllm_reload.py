"""vLLM's own layer-by-layer reload on a small module, broken off at each tensor, through the Reloader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import PeerLostError
from paceline.rollout.engines.vllm.reload import Reloader, Tensors

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

NAMES = [f"layers.{layer}.{kind}" for layer in range(2) for kind in ("weight", "bias")]


class Model(nn.Module):
    """Two layers, loaded as vLLM's models are: through each parameter's `weight_loader`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def load_weights(self, weights: Tensors) -> set[str]:
        """Loads each tensor into the parameter of its name."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        names, params = set(), dict(self.named_parameters())
        for name, tensor in weights:
            param = params[name]
            getattr(param, "weight_loader", default_weight_loader)(param, tensor)
            names.add(name)
        return names


def reloader_of(model: Model) -> Reloader:
    from vllm.model_executor.model_loader.reload import layerwise

    config: Any = SimpleNamespace(dtype=torch.float32)
    layerwise.record_metadata_for_reloading(model)

    def reload(tensors: Tensors) -> None:
        layerwise.initialize_layerwise_reload(model)
        model.load_weights(tensors)
        layerwise.finalize_layerwise_reload(model, config)

    return Reloader(model, reload, lambda: layerwise.finalize_layerwise_reload(model, config))


def tensors(value: float, *, names: list[str] = NAMES, fail_at: int | None = None) -> Tensors:
    for number, name in enumerate(names):
        if number == fail_at:
            raise PeerLostError("the learner went away", peer="learner")
        yield name, torch.full((2, 2) if name.endswith("weight") else (2,), value)


@torch.no_grad()
def test_a_reload_that_breaks_off_leaves_nothing_to_the_next() -> None:
    model = Model()
    addresses = [param.data_ptr() for param in model.parameters()]
    reloader = reloader_of(model)
    for fail_at in range(len(NAMES)):
        reloader.load(tensors(1.0))
        with pytest.raises(PeerLostError, match="the learner went away"):
            reloader.load(tensors(2.0, fail_at=fail_at))
        # In another order: what the broken load had collected would complete a layer with old values.
        reloader.load(tensors(3.0, names=NAMES[::-1]))
        assert {value for param in model.parameters() for value in param.flatten().tolist()} == {3.0}
        assert [param.data_ptr() for param in model.parameters()] == addresses
