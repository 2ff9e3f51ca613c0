"""Which runs may go on in a directory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.controller.batch.inputs import HeldOutPrompts, Inputs
from paceline.controller.events import EventHub
from paceline.controller.run.records.opening import open_run
from paceline.core.clock import SystemClock
from paceline.core.digest import file_digest
from paceline.core.errors import ConfigError
from paceline.core.run_record.run_events import NoticeEvent
from paceline.core.samples.trajectory import RewardContext
from paceline.core.user_functions.user_function import source_file
from paceline.data.mixture import PromptMixture
from paceline.data.prompts import Prompt, PromptSet
from support.sequencer_run import config, prompts


def inputs(**changed: Any) -> Inputs:
    """Seven prompts; `changed` are attributes of the second one."""
    train = dict(prompts(7).prompts)
    second: Prompt = dataclasses.replace(train[1], **changed)
    train[1] = second
    return Inputs(
        train=PromptSet(prompts=train, num_filtered=0),
        val=tuple(HeldOutPrompts(of=of, prompts=prompts(2)) for of in config().held_out_sets),
        cursor=PromptMixture({"": range(7)}, batch_size=3, seed=0),
        stop_token_ids=(0,),
    )


def opened(folder: Path, with_inputs: Inputs | None = None, **changes: Any) -> str:
    return opened_with_notices(folder, with_inputs, **changes)[0]


def opened_with_notices(
    folder: Path, with_inputs: Inputs | None = None, **changes: Any
) -> tuple[str, list[str]]:
    journal, run_id, notices = open_run(folder, config(**changes), with_inputs or inputs(), SystemClock())
    journal.close()
    return run_id, notices


def test_the_same_run_goes_on_under_its_id_in_the_next_term(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path, trainer__total_steps=50, trainer__save_freq=7) == first
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["term"], e["run_id"]) for e in events] == [("run", 1, first), ("run", 2, first)]
    assert events[0]["data_digest"] == events[1]["data_digest"] == inputs().digest


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": np.asarray([1, 2, 4], dtype=np.int32)},
        {"context": RewardContext(ground_truth="other")},
        {"context": RewardContext(ground_truth="1", extra={"level": "\ud800"})},
    ],
)
def test_other_data_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match=r"begun with other data.*trainer\.run_dir"):
        opened(tmp_path, inputs(**changed))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer__seed", 5, "trainer.seed=5 instead of 0"),
        ("data__train_batch_size", 6, "data.train_batch_size=6 instead of 3"),
        ("rollout__n", 3, "rollout.n=3 instead of 2"),
    ],
)
def test_other_settings_are_refused_by_name(key: str, value: Any, said: str, tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, **{key: value})


def test_an_earlier_run_is_never_mixed_with_a_new_one(tmp_path: Path) -> None:
    opened(tmp_path, trainer__resume="never")
    with pytest.raises(ConfigError, match="holds an earlier run, and trainer.resume is never"):
        opened(tmp_path, trainer__resume="never")


def test_the_term_names_the_code_of_the_user_and_a_change_of_it_is_said(tmp_path: Path) -> None:
    own, run_dir = tmp_path / "flow.py", tmp_path / "run"
    own.write_text("async def flow(step): ...\n")
    reference = f"{own}:flow"

    def notices(reference: str | None) -> list[str]:
        return opened_with_notices(run_dir, trainer__dataflow=reference)[1]

    def journaled() -> dict[str, list[str]]:
        return json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])["code"]

    assert notices(reference) == []
    first = journaled()["trainer.dataflow"]
    assert first == [reference, file_digest(own, like="")]
    assert notices(reference) == []
    own.write_text("async def flow(step): await step.publish()\n")
    said = f"trainer.dataflow={reference}: its file was another when this run was last started"
    assert [notice.startswith(said) for notice in notices(reference)] == [True]
    assert journaled()["trainer.dataflow"] != first
    assert notices(reference) == []
    assert notices(None) == []
    assert journaled() == {}


def test_another_reference_and_a_file_that_is_not_here(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    opened(run_dir, algorithm__adv_estimator="elsewhere.py:f")
    event = json.loads((run_dir / "events.jsonl").read_text())
    assert event["code"] == {"algorithm.adv_estimator": ["elsewhere.py:f", ""]}
    (notice,) = opened_with_notices(run_dir, algorithm__adv_estimator="elsewhere.py:g")[1]
    assert notice.startswith("algorithm.adv_estimator=elsewhere.py:g: it was elsewhere.py:f when this run")


def test_every_key_that_names_the_users_code_is_known() -> None:
    own = config(
        trainer__dataflow="d.py:flow",
        algorithm__type="custom",
        algorithm__path="a.py:A",
        algorithm__adv_estimator="e.py:f",
        actor__policy_loss={"type": "custom", "path": "package.loss:f"},
        reward__functions=[{"name": "exact_match"}, {"name": "r.py:f"}],
        rollout__tools=["t.py:f"],
    )
    assert own.own_code == {
        "trainer.dataflow": "d.py:flow",
        "algorithm.path": "a.py:A",
        "algorithm.adv_estimator": "e.py:f",
        "actor.policy_loss": "package.loss:f",
        "reward.functions[1]": "r.py:f",
        "rollout.tools[0]": "t.py:f",
    }


def test_the_file_of_a_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_room" / "inner").mkdir(parents=True)
    module, package = tmp_path / "bad_room" / "own.py", tmp_path / "bad_room" / "inner" / "__init__.py"
    for file in (module, package):
        file.write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_file("bad_room.own:f") == module
    assert source_file("bad_room.inner:f") == package
    assert source_file("bad_room.neither:f") is None
    assert source_file(f"{module}:f") == module


async def test_a_notice_before_anyone_follows_is_heard_by_the_first_follower() -> None:
    hub = EventHub()
    hub.notice("early")
    for expected in (["early"], []):
        hub_end = hub.follow(0)
        heard = []
        hub.end(ok=True, message="")
        async for event in hub_end:
            heard += [event.message] if isinstance(event, NoticeEvent) else []
        assert heard == expected
