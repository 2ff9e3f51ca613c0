"""Warm steps, held against what was expected of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS
from paceline.models.model_shape import ModelShape
from paceline.show.live.view import Metrics
from paceline.show.live.wrapping_views import ExpectingView
from paceline.sizing.expectation import Expectation
from paceline.sizing.machine import Machine
from support.timed_steps import BOUNDED, SHAPES, TIMED, write_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    write_project(tmp_path)
    return tmp_path


def watched(name: str, *, gen: float, update: float, **rollout: object) -> tuple[list[str], Expectation]:
    """What the view says in five steps of which the first is cold."""
    timed = TIMED[name]
    tree = timed.config.model_dump(mode="json", exclude_unset=True)
    tree["rollout"] |= rollout
    shape = ModelShape.of(SHAPES[timed.shape])
    assert shape is not None
    expectation = Expectation(config=parse(RunConfig, tree), shape=shape, card=CARDS[timed.card])
    step = gen + update + 1.5
    tokens = timed.prompts * 8 * (timed.prompt + timed.response)
    warm = {
        "timing_s/step": step,
        "timing_s/gen": gen,
        "timing_s/update_actor": update,
        "response_length/mean": float(timed.response),
        "perf/tokens_per_s": tokens / step,
    }
    cold = warm | {"timing_s/gen": 60.0, "timing_s/step": 90.0}
    view = NotedView()
    expecting = ExpectingView(view, expectation)
    expecting.step(0, {"val/reward/mean": 0.3})
    for number, row in enumerate((cold, warm, warm, warm, warm), start=1):
        expecting.step(number, row)
        if number < 4:
            assert view.notices == []
    assert view.steps == [0, 1, 2, 3, 4, 5]
    return view.notices, expectation


class NotedView:
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.steps: list[int] = []

    def milestone(self, text: str) -> None: ...

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)

    def validation(self, step: int, metrics: Metrics) -> None: ...

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def pulse(self) -> None: ...

    def close(self) -> None: ...


def test_with_a_bound_the_generation_to_expect_is_what_the_learner_waits_for() -> None:
    timed = BOUNDED["1"]
    shape = ModelShape.of(SHAPES[timed.shape])
    assert shape is not None
    assert timed.mean is not None
    expectation = Expectation(config=timed.config, shape=shape, card=CARDS[timed.card])
    waited, update, step = timed.seconds
    row = {
        "timing_s/step": step,
        "timing_s/gen": waited,
        "timing_s/update_actor": update,
        "response_length/mean": float(timed.mean[1]),
        "perf/tokens_per_s": 16 * 8 * sum(timed.mean) / step,
    }
    [sentence] = filter(None, [expectation.step(row) for _ in range(5)])
    estimate = timed.estimate
    expected = f"{estimate.seconds:.1f}, {estimate.waited:.1f}, {estimate.update:.1f}"
    assert sentence.endswith(f"generation 6.8, update 8.2; expected for answers of this length: {expected}")


def test_warm_steps_are_held_against_the_estimate() -> None:
    (sentence,), expectation = watched("3B", gen=6.7, update=6.1)
    estimate = TIMED["3B"].estimate
    assert sentence == (
        "3 warm steps took 14.3 s (median): generation 6.7, update 6.1; expected for answers of this length: "
        f"{estimate.seconds:.1f}, {estimate.generation:.1f}, {estimate.update:.1f}"
    )
    assert expectation.step({"timing_s/gen": 1.0}) == ""


def test_a_slow_phase_is_told_with_what_to_look_at() -> None:
    (sentence,), _ = watched("3B", gen=10.0, update=9.0)
    assert sentence.endswith(
        "; generation is slow: the engine's GPU waits for its host, or is shared: look for other programs on "
        "its cores and in nvidia-smi; the update is slow: look in nvidia-smi for low clocks, high "
        "temperatures and other programs on the GPUs"
    )
    (sentence,), _ = watched("32B, averages on the host", gen=30.0, update=12.0, enforce_eager=True)
    assert "generation is slow: leave rollout.enforce_eager out" in sentence
    assert sentence.endswith("the update is slow: set actor.compile: true")


@pytest.mark.usefixtures("project")
def test_nothing_is_expected_where_too_little_is_known() -> None:
    timed = TIMED["3B"].config
    config = timed.model_copy(update={"model": timed.model.model_copy(update={"path": "3B"})})
    known = Machine.imagined(2, CARDS["H100"])
    assert Expectation.of(config, known) is not None
    assert Expectation.of(config, Machine(num_cores=2, gpus=(0, 1))) is None
    cpu = config.model_copy(update={"learner": config.learner.model_copy(update={"device": "cpu"})})
    assert Expectation.of(cpu, known) is None
    tools = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tools": ("t.py:f",)})})
    assert Expectation.of(tools, known) is None
