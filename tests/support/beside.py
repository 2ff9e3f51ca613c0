"""A run with validation servers, whose answers tell which version gave them."""

from __future__ import annotations

from typing import Any

from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import PromptGroup
from support.fake_fleet import score_by_component

SETS: dict[str, Any] = {
    "data__val_sets": {"hard": {"files": "hard.jsonl", "n": 2, "temperature": 1.0, "every": 2}},
    "trainer__test_freq": 2,
    "trainer__total_steps": 6,
    "trainer__save_freq": 0,
}
BESIDE: dict[str, Any] = {**SETS, "rollout__replicas": 3, "rollout__validation_servers": 1}


def by_version(group: PromptGroup, index: int) -> dict[str, Any]:
    """The reward of an answer tells which version gave it."""
    if group.purpose != Purpose.VALIDATE:
        return score_by_component(group, index)
    assert group.step == group.policy.version
    reward = group.step + index / 10 + group.prompt_id / 100
    return {"reward": reward, "reward_error": None, "components": {"exact_match": reward}}
