"""Rows scored by vLLM: what it refuses after it has loaded the model; with a fake in place of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.rollout.engines.scored_rows import ScoredRow
from paceline.rollout.engines.vllm import scoring
from paceline.rollout.engines.vllm.scoring import largest_difference

ROWS = [ScoredRow(prompt=[1, 2], response=[3], log_probs=[-1.0])]


class FakeEngine:
    """Answers with a log-prob of -1.0, unless it fails where it is told to."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in, self.calls = fails_in, list[str]()
        self.model_config = SimpleNamespace(hf_config=None)

    def add_request(self, number: str, prompt: Any, sampling: Any) -> None:
        self._called("add_request")

    def has_unfinished_requests(self) -> bool:
        return self.calls[-1] == "add_request"

    def step(self) -> list[Any]:
        self._called("step")
        scores = [None, {2: SimpleNamespace(logprob=-3.0)}, {3: SimpleNamespace(logprob=-1.0)}]
        return [SimpleNamespace(request_id="0", finished=True, prompt_logprobs=scores)]

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise RuntimeError("Unsupported CPU attention configuration:\nhead_dim=16")


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(request.param)
    vllm, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    monkeypatch.setattr(vllm, "SamplingParams", dict, raising=False)
    monkeypatch.setattr(inputs, "tokens_input", list, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)
    monkeypatch.setattr(scoring, "_engine", lambda folder: SimpleNamespace(llm_engine=engine))
    return engine


@pytest.mark.parametrize(
    ("fake", "calls"),
    [("add_request", ["add_request"]), ("step", ["add_request", "step"])],
    indirect=["fake"],
)
def test_what_the_engine_refuses_later_is_a_fault_of_the_model(
    fake: FakeEngine, calls: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        largest_difference(tmp_path, ROWS)
    assert str(caught.value).startswith(
        "vLLM does not run this model (RuntimeError: Unsupported CPU attention configuration: head_dim=16); "
    )
    assert fake.calls == calls


@pytest.mark.parametrize("fake", [""], indirect=True)
def test_the_same_log_probs_differ_by_nothing(fake: FakeEngine, tmp_path: Path) -> None:
    assert largest_difference(tmp_path, ROWS) == 0.0
    assert fake.calls == ["add_request", "step"]
