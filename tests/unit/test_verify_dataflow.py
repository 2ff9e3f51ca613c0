"""What `paceline verify` says of a dataflow's record that was changed."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fake_fleet import FakeServices
from support.killed_sequencer import breaches_of, journal_events, live
from support.memory_broker import MemoryBroker
from support.sequencer_run import config

SOURCE = """
    async def flow(step):
        drafts = await step.sample(step.draw(), "draft")
        revised = await step.sample([step.reply(s, "Again.") for s in drafts if s.index == 0], "revise")
        await step.train([*drafts, *(s.with_reward(3.0) for s in revised if s.index == 1)])
        await step.publish()
"""


def score(group: Any, index: int) -> dict[str, Any]:
    return {"reward": float(index), "reward_error": None, "components": {"exact_match": float(index)}}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "flow.py").write_text(textwrap.dedent(SOURCE))
    return folder


def settings(folder: Path) -> Any:
    lengths: dict[str, Any] = {"data__max_prompt_length": 256, "actor__ppo_max_token_len_per_gpu": 4096}
    return config(**lengths, trainer__dataflow=f"{folder / 'flow.py'}:flow")


@pytest.fixture
async def run_dir(recorded: Path, tmp_path: Path) -> Path:
    if not (recorded / "events.jsonl").exists():
        fakes, broker = FakeServices(), MemoryBroker()
        fakes.writes = True
        assert await live(settings(recorded), recorded, fakes, broker, score)
    folder = tmp_path / "run"
    shutil.copytree(recorded, folder)
    return folder


Record = list[dict[str, Any]]


def of(record: Record, kind: str, step: int = 1) -> dict[str, Any]:
    return next(event for event in record if event["event"] == kind and event["step"] == step)


def swap_rows(record: Record) -> None:
    rows = of(record, "batch")["rows"]
    rows[0], rows[1] = rows[1], rows[0]


def train_another(record: Record) -> None:
    of(record, "batch")["rows"][-1][0] = "revise:1:9:5"


def give_another_reward(record: Record) -> None:
    of(record, "batch")["rows"][-1][1] = 2.0


def give_another_baseline(record: Record) -> None:
    of(record, "batch")["rows"][0][2] = 0.5


def lose_the_rows(record: Record) -> None:
    del of(record, "batch")["rows"]


def number_anew(record: Record) -> None:
    of(record, "sampling")["number"] = 3


def sample_of_another_policy(record: Record) -> None:
    of(record, "sampling", 2)["policy"] = of(record, "sampling")["policy"]


def ask_twice(record: Record) -> None:
    """A controller goes on with step 1, and the dataflow asks for something else."""
    place = record.index(of(record, "batch"))
    again = {**of(record, "sampling"), "digest": "0" * 32}
    collected = [e for e in record[:place] if e["event"] == "trajectory" and ":1:" in e["id"]]
    drafts = [e for e in collected if e["id"].startswith("draft")]
    revised = [e for e in collected if e["id"].startswith("revise")]
    resumed = {"event": "resume", "step": 1, "phase": "collect", "time": record[place]["time"]}
    record[place:place] = [resumed, *drafts, again, *revised]


def lose_a_sample(record: Record) -> None:
    record.remove(next(e for e in record if e.get("id") == "revise:1:8:0"))


CHANGES: dict[str, tuple[Callable[[Record], None], str]] = {
    "rows out of order": (swap_rows, "is trained twice or out of order"),
    "a row of nowhere": (train_another, "revise:1:9:5 was trained, but no sampling of the step kept it"),
    "another reward": (give_another_reward, "I3: the batch of step 1 has 9 rows and the digest"),
    "another baseline": (give_another_baseline, "I3: the batch of step 1 has 9 rows and the digest"),
    "no rows": (lose_the_rows, "does not say to which of 2 samplings it belongs"),
    "another number": (number_anew, "I2: sampling 3 of step 1 follows 1 others"),
    "an older policy": (sample_of_another_policy, "I1: step 2 samples from v0@"),
    "something else": (ask_twice, "I2: sampling 2 of step 1 differs from its first request"),
    "a lost sample": (lose_a_sample, "I2: prompt 8 of step 1 was trained with 1 of 2 samples for revise"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_record_that_was_changed_is_told(change: str, run_dir: Path, recorded: Path) -> None:
    plant, sentence = CHANGES[change]
    assert breaches_of(run_dir, settings(recorded)) == []
    record = journal_events(run_dir)
    plant(record)
    numbered = [{**event, "n": number} for number, event in enumerate(record)]
    (run_dir / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in numbered))
    breaches = breaches_of(run_dir, settings(recorded))
    assert any(sentence in breach for breach in breaches), breaches
