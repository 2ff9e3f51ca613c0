"""Full tensors through SGLang's own loader: all must arrive, and where they were before."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from paceline.core.errors import ModelError  # noqa: E402
from paceline.rollout.engines.sglang.loading import load_full, refresh_copies  # noqa: E402

pytestmark = pytest.mark.torch


class SmallModel(nn.Module):
    """Two parameters, of which its loader knows the named ones."""

    def __init__(self, known: tuple[str, ...] = ("first.weight", "second.weight")) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)
        self._known = known

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self._known:
                self.get_parameter(name).data.copy_(tensor)


def tensors() -> list[tuple[str, Tensor]]:
    return [("first.weight", torch.ones(2, 2)), ("second.weight", torch.full((3, 2), 2.0))]


def test_tensors_lie_in_the_parameters_afterwards() -> None:
    model = SmallModel()
    load_full(model, "qwen2")(iter(tensors()))
    assert (model.first.weight.unique().tolist(), model.second.weight.unique().tolist()) == ([1.0], [2.0])


def test_a_parameter_that_the_loader_leaves_out_is_named() -> None:
    with pytest.raises(ModelError, match=r"has not written second\.weight \(1 such .*another rollout.name"):
        load_full(SmallModel(known=("first.weight",)), "qwen2")(iter(tensors()))


def test_a_parameter_that_is_written_in_another_thread_is_refused_rather_than_believed() -> None:
    class Threaded(SmallModel):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(super().load_weights, list(weights)).result()

    with pytest.raises(ModelError, match="as far as can be seen"):
        load_full(Threaded(), "qwen2")(iter(tensors()))


def test_parameters_that_are_moved_are_refused() -> None:
    class Moving(SmallModel):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights(weights)
            self.first.weight = nn.Parameter(self.first.weight.detach().clone())

    with pytest.raises(ModelError, match="has moved parameters of Moving"):
        load_full(Moving(), "qwen2")(iter(tensors()))


def test_what_sglang_does_after_a_load_is_part_of_it() -> None:
    model = SmallModel()

    def reload(weights: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights(weights)
        model.second.weight.data.mul_(3)

    load_full(model, "qwen2", reload)(iter(tensors()))
    assert model.second.weight.unique().tolist() == [6.0]


def test_halves_of_a_matrix_that_sglang_keeps_follow_a_push_in_place() -> None:
    class LatentAttention(nn.Linear):
        """As in SGLang's DeepSeek: the halves are made once, and graphs then read them."""

        def post_load_weights(self) -> None:
            self.half.copy_(self.weight[:1])

    model = LatentAttention(2, 2, bias=False)
    model.half = torch.zeros(1, 2)
    before = model.half
    refresh_copies(model)
    assert model.half is before
    assert torch.equal(before, model.weight[:1])


def test_a_copy_of_a_router_that_sglang_keeps_follows_a_push_in_place() -> None:
    class Router(nn.Linear):
        """As in SGLang's GLM-4.5: the first step makes the copy, and graphs then read it."""

        def __init__(self) -> None:
            super().__init__(2, 2, bias=False)
            self.register_buffer("_weight_fp32", None, persistent=False)

    model = nn.Sequential(Router(), Router())
    router, before = model[0], torch.zeros(2, 2)
    router._weight_fp32 = before
    refresh_copies(model)
    assert router._weight_fp32 is before
    assert torch.equal(before, router.weight)
    assert model[1]._weight_fp32 is None  # it has had no step, and will copy the pushed weights
