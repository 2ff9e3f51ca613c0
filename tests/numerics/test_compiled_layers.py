"""Compiled layers: no compilation per micro-batch, and a ratio of 1 though the compiler rounds as it likes.

A backend of the test's stands in for the compiler: making kernels takes minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import NumericsError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model import compiling
from paceline.learner.train import score
from paceline.learner.train.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("ranks"),
    pytest.mark.timeout(240),
    # torch's own, while it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}


class Compiler:
    """Counts compilations; graphs without gradients round differently."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        if torch.is_grad_enabled():
            return graph.forward

        def rounded(*arguments: Any) -> Any:
            outputs = graph.forward(*arguments)
            return [x * 1.001 if torch.is_tensor(x) and x.is_floating_point() else x for x in outputs]

        return rounded


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    backend = Compiler()
    monkeypatch.setattr(compiling, "BACKEND", backend)
    yield backend
    torch._dynamo.reset()


def build(model: Path, ranks: Ranks, **actor: Any) -> Learner:
    settings = {"ppo_max_token_len_per_gpu": 96, "ratio_audit_freq": 1, **actor}
    return Learner.build(run_config(model, algorithm=GROUPS, actor=settings), ranks)


def test_lengths_compile_once_and_numbers_are_those_of_eager_layers(
    model: Path, ranks: Ranks, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    eager, compiled = build(model, ranks), build(model, ranks, compile=True, shared_prompts="on")
    caplog.set_level("INFO", "paceline.learner.train.step")
    assert take_step(compiled, 1).metrics["perf/compile_s"] > 0
    first = compiler.num_graphs
    assert 0 < first <= 8
    assert f"step 1: {first} compilations of layers took" in caplog.text
    results = [take_step(compiled, step) for step in (2, 3)]
    assert compiler.num_graphs == first
    assert [result.metrics["perf/compile_s"] for result in results] == [0.0, 0.0]
    metrics = [numbers(result) for result in results]
    take_step(eager, 1)
    for step, own in zip((2, 3), metrics, strict=True):
        assert own == pytest.approx(numbers(take_step(eager, step)), rel=1e-3, abs=1e-5)
        assert own["actor/first_ppo_kl"] == 0.0


def test_old_log_probs_without_a_graph_would_part_from_the_update(
    model: Path, ranks: Ranks, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build(model, ranks, compile=True)
    honest = score._score_all

    def without_graph(*arguments: Any, with_graph: bool) -> Any:
        return honest(*arguments, with_graph=False)

    take_step(learner, 1)
    monkeypatch.setattr(score, "_score_all", without_graph)
    with pytest.raises(NumericsError, match="must be exactly on policy"):
        take_step(learner, 2)
