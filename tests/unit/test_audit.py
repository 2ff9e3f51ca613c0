"""The offline checker on journals in which one thing is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.audit import main, violations

Events = list[dict[str, Any]]


def journal() -> Events:
    """One sound step of prompts 1 and 2, two samples and a greedy answer each; 3 replaces 1, 2 is dropped."""

    def admitted(*prompts: int) -> Events:
        names = [
            f"{kind}:{p}:{i}"
            for p in prompts
            for kind, i in (("train:1", 0), ("train:1", 1), ("greedy:1", 0))
        ]
        return [{"event": "trajectory", "id": name, "verdict": "admitted"} for name in names]

    phases = ["forming", "publish", "commit", "dispatch", "collect", "learn", "publish", "commit"]
    moves: Events = [{"event": "phase", "to": to} for to in phases]
    refill = {"event": "refill", "step": 1, "reason": "degenerate", "set_aside": [[1, 0.0]], "prompts": [3]}
    events: Events = [
        {"event": "run", "step": 0},
        *moves[:2],
        {"event": "commit", "version": 0, "digest": "a"},
        moves[2],
        {"event": "dispatch", "step": 1, "policy": "v0@a", "prompts": [1, 2], "greedy": True},
        *moves[3:5],
        *admitted(1),
        refill,
        *admitted(3),
        {"event": "group_dropped", "step": 1, "prompt": 2, "reason": "reward:timeout"},
        *moves[5:7],
        {"event": "commit", "version": 1, "digest": "b"},
        moves[7],
    ]
    return [{"n": n, **event} for n, event in enumerate(events)]


def only(events: Events, kind: str) -> dict[str, Any]:
    (event,) = [event for event in events if event["event"] == kind]
    return event


def without(events: Events, name: str) -> None:
    events.remove(next(event for event in events if event.get("id") == name))


BREACHES = {
    "a sample is missing": (
        lambda e: without(e, "train:1:3:1"),
        "I2: prompt 3 of step 1 ended with 1 of 2 samples and was not dropped",
    ),
    "a greedy answer is missing": (
        lambda e: without(e, "greedy:1:3:0"),
        "I2: prompt 3 of step 1 was trained with 0 of 1 greedy answers",
    ),
    "a greedy answer comes twice": (
        lambda e: e.insert(-5, {**e[9], "id": "greedy:1:3:0"}),
        "I3: greedy:1:3:0 was admitted twice",
    ),
    "set aside before it was complete": (
        lambda e: without(e, "train:1:1:0"),
        "I2: prompt 1 of step 1 was set aside with 1 of 2 samples",
    ),
    "set aside without a reason": (
        lambda e: only(e, "refill").update(reason=""),
        "I2: prompt 1 of step 1 was set aside without a reason",
    ),
    "set aside and dropped": (
        lambda e: e.insert(-5, {**only(e, "group_dropped"), "prompt": 1}),
        "I2: prompt 1 of step 1 was dropped though it was out already",
    ),
    "asked for twice": (
        lambda e: only(e, "refill")["prompts"].append(2),
        "I2: prompt 2 was asked for twice in step 1",
    ),
    "a stranger is set aside": (
        lambda e: only(e, "refill")["set_aside"].append([8, 0.0]),
        "I2: prompt 8 was set aside in step 1, which did not ask for it",
    ),
    "more trained than the step began with": (
        lambda e: only(e, "dispatch").update(prompts=[1]),
        "I2: prompt 2 was dropped in step 1, which did not ask for it",
    ),
}


def test_a_sound_journal_has_no_breach() -> None:
    assert violations(journal(), num_samples=2) == []


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_is_found(name: str) -> None:
    spoil, sentence = BREACHES[name]
    events = copy.deepcopy(journal())
    spoil(events)
    assert sentence in violations(events, num_samples=2)


def test_more_groups_than_the_step_began_with_are_a_breach() -> None:
    events = [event for event in journal() if event["event"] != "group_dropped"]
    refill = only(events, "refill")
    refill.update(set_aside=[], prompts=[3])
    events = [event for event in events if not str(event.get("id", "")).endswith((":2:0", ":2:1"))]
    breaches = violations(events, num_samples=2)
    assert "I2: step 1 trained 3 prompts, more than the 2 that it began with" in breaches


def test_a_run_directory_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "data": {"train_files": "t.jsonl"},
        "model": {"path": "m"},
        "rollout": {"n": 2},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1},
    }
    (tmp_path / "config.resolved.yaml").write_text(json.dumps(config))
    assert main([str(tmp_path)]) == 2
    assert "no journal" in capsys.readouterr().err
    events = journal()
    write = (tmp_path / "events.jsonl").write_text
    write("".join(json.dumps(event) + "\n" for event in events))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{len(events)} events: every invariant holds\n"
    BREACHES["more trained than the step began with"][0](events)
    write("".join(json.dumps(event) + "\n" for event in events))
    assert main([str(tmp_path)]) == 1
    assert "I2: prompt 2 was dropped in step 1, which did not ask for it" in capsys.readouterr().out
