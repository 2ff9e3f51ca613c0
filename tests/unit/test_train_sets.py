"""Several training sets with weights, and their curriculum: configuration, rows, runs, `paceline verify`."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.data import DataConfig
from paceline.controller.batch.inputs import load_inputs
from paceline.controller.run.records import train_metrics
from paceline.controller.run.records.opening import open_run
from paceline.controller.verify.check import follow
from paceline.controller.verify.findings import Findings
from paceline.controller.verify.journal.entries import read
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, DataError
from paceline.core.run_record.step_metrics import meaning
from paceline.core.samples.trajectory import PromptGroup
from paceline.data.hub import uses_hub
from paceline.data.mixture import PromptMixture
from support.byte_tokenizer import save_tokenizer
from support.fake_fleet import FakeServices
from support.headers import scored
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, run_of
from support.source import ROOT

SETS: dict[str, Any] = {
    "data__train_files": [],
    "data__train_sets": {"math": {"files": "m.jsonl", "weight": 2}, "code": "c.jsonl"},
}
"""In runs, math has the prompts 0, 1 and 2, code 3, 4 and 5."""
STAGES: dict[str, Any] = {**SETS, "data__curriculum": [{"from_step": 3, "weights": {"code": 1}}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__train_sets": SETS["data__train_sets"]},
            "train_files and train_sets: .*leave train_files out",
        ),
        ({**SETS, "data__train_max_prompts": 3}, "leave train_max_prompts out"),
        ({**SETS, "data__train_sets": {"a": {"files": "x", "weight": 0}}}, "all weights .* 0 from step 1 on"),
        ({"data__curriculum": [{"from_step": 1, "weights": {"a": 1}}]}, "set train_sets, too"),
        ({**SETS, "data__curriculum": [{"from_step": 2, "weights": {"mat": 1}}]}, "'mat'.* has math, code"),
        ({**SETS, "data__curriculum": [{"from_step": 2, "weights": {"math": 0}}]}, "0 from step 2 on"),
        ({**SETS, "data__curriculum": [{"from_step": 2, "weights": {"math": -1}}]}, "curriculum.*0"),
        (
            {**STAGES, "data__curriculum": STAGES["data__curriculum"] * 2},
            "the steps .3, 3.; write them in order",
        ),
        ({**SETS, "data__curriculum": "mine.py"}, "write path/to/file.py:function"),
        ({**SETS, "data__train_sets": {"source": "x"}}, "'source' cannot name a set"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_train_files_are_one_set_without_a_name() -> None:
    (unnamed,) = config(data__train_max_prompts=5).data.training_sets
    assert (unnamed.name, unnamed.files, unnamed.max_prompts) == ("", ("t.jsonl",), 5)
    assert [(of.step, of.weights) for of in config(**STAGES).data.weights_by_step] == [
        (1, (2, 1)),
        (3, (0, 1)),
    ]
    assert uses_hub(config(data__train_files=[], data__train_sets={"a": "openai/gsm8k:main"}))


def rows(folder: Path, name: str, *levels: object) -> str:
    lines = [{"prompt": f"{name}{n}", "ground_truth": "1", "level": v} for n, v in enumerate(levels)]
    (folder / name).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(folder / name)


def loaded(folder: Path, **changes: Any) -> Any:
    save_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text('{"eos_token_id": 3}')
    return load_inputs(config(model__path=str(folder / "model"), data__val_files=[], **changes))


def test_each_set_has_its_rows_in_order_of_the_column(tmp_path: Path) -> None:
    sets = {
        "a": {"files": rows(tmp_path, "a.jsonl", 3, 1, 2, 9), "max_prompts": 3},
        "b": {"files": [rows(tmp_path, "b.jsonl", 0.5), rows(tmp_path, "c.jsonl", 0.25)], "weight": 2},
    }
    changes: dict[str, Any] = {"data__train_files": [], "data__train_sets": sets}
    inputs = loaded(tmp_path, **changes, data__order_by="level")
    truths = {i: bytes(p.token_ids.tolist()).decode() for i, p in inputs.train.prompts.items()}
    assert list(truths) == [0, 1, 2, 3, 4]
    assert [inputs.cursor.set_of(i) for i in range(6)] == ["a", "a", "a", "b", "b", None]
    assert inputs.cursor.take(1) == [1, 4, 3]
    assert loaded(tmp_path, **changes).digest != inputs.digest
    other = {**changes, "data__train_sets": {"x": sets["a"], "b": sets["b"]}}
    assert loaded(tmp_path, **other, data__order_by="level").digest != inputs.digest


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (("1", 2), "has numbers and strings"),
        ((1, None), "row 1 has None in column 'level'"),
        (([1], [2]), r"row 0 has \[1\]"),
        ((float("nan"), 1), "row 0 has None"),
    ],
)
def test_rows_that_have_no_order_are_refused(
    levels: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, data__train_files=rows(tmp_path, "t.jsonl", *levels), data__order_by="level")


def asked(it: SequencerRun) -> list[list[int]]:
    return [event["prompts"] for event in it.events() if event["event"] == "dispatch"]


def by_set(it: SequencerRun) -> list[str]:
    return ["".join("m" if prompt < 3 else "c" for prompt in prompts) for prompts in asked(it)]


def answer(group: PromptGroup, index: int) -> dict[str, Any]:
    return {"reward": group.prompt_id + index / 2, "reward_error": None}


async def steps(folder: Path, services: FakeServices, total: int, **changes: Any) -> SequencerRun:
    """Runs to a step; goes on where the folder has a run."""
    cfg = config(**changes, trainer__total_steps=total, trainer__save_trajectories=False)
    async with run_of(cfg, folder, services, MemoryBroker()) as it:
        services.writes = True
        await it.enlist_all()
        await it.go(answer)
        return it


async def test_a_run_draws_by_the_weights_of_each_step_and_goes_on_the_same(tmp_path: Path) -> None:
    expected = await steps(tmp_path / "whole", FakeServices(), 6, **STAGES)
    assert by_set(expected) == ["mmc", "mmc", "ccc", "ccc", "ccc", "ccc"]
    assert expected.breaches() == []
    services = FakeServices()
    for total in (1, 2, 5, 6):
        it = await steps(tmp_path / "parts", services, total, **STAGES)
    assert asked(it) == asked(expected)
    assert it.breaches() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data__curriculum": [{"from_step": 2, "weights": {"code": 1}}]},
            r"data.train_sets \(weights by step\)=\[\[1, \[2.0, 1.0\]\], \[2, .*instead of .*\[3, ",
        ),
        ({"data__order_by": "level"}, "data.order_by='level' instead of None"),
    ],
)
async def test_other_weights_are_refused_when_a_run_goes_on(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    it = await steps(tmp_path, FakeServices(), 1, **STAGES)
    with pytest.raises(ConfigError, match=said):
        open_run(tmp_path, config(**{**STAGES, **changes}), it.sequencer._inputs, SystemClock())


async def test_verify_finds_prompts_that_the_weights_do_not_put_next(tmp_path: Path) -> None:
    it = await steps(tmp_path, FakeServices(), 4, **STAGES)
    journal, text = tmp_path / "events.jsonl", (tmp_path / "events.jsonl").read_text()
    events = it.events()
    for name, change, message in (
        ("dispatch", lambda e: e["prompts"].__setitem__(0, 0), "step 3 asked for prompts that are not next"),
        ("step", lambda e: e["cursor"]["due"].__setitem__(0, 0.5), "the cursor stands at"),
        ("step", lambda e: e["cursor"].update(chosen=[0, 1]), "the cursor stands at"),
    ):
        planted = json.loads(json.dumps(events))
        change(next(e for e in planted if e["event"] == name and e["step"] == 3))
        journal.write_text("".join(json.dumps(e) + "\n" for e in planted))
        assert any(message in breach for breach in it.breaches()), message
    journal.write_text(text)
    assert it.breaches() == []


PAGE = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")


def examples(language: str, *headings: str) -> list[str]:
    """The page's examples in a language under these headings."""
    sections = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}
    pattern = re.compile(f"```{language}\n(.*?)```", re.DOTALL)
    return [found for heading in headings for found in pattern.findall(sections[heading])]


def test_the_sets_of_the_page_are_drawn_as_it_says() -> None:
    (tree,) = map(yaml.safe_load, examples("yaml", "Several data sets"))
    data = DataConfig(**tree["data"])
    ids = iter(range(60_000))
    sets = {of.name: list(islice(ids, 20_000)) for of in data.training_sets}
    draw = PromptMixture(sets, batch_size=64, seed=0, schedule=data.weights_by_step)
    counts = [Counter(map(draw.set_of, draw.take(step))) for step in range(1, 11)]
    assert {count["math"] for count in counts} == {38, 39}
    assert {count[name] for count in counts for name in ("code", "chat")} == {12, 13}
    assert sum(count["math"] for count in counts) == 384
    assert data.training_sets[1].max_prompts == 20_000


def test_the_curricula_of_the_page() -> None:
    stages, ordered, own = map(yaml.safe_load, examples("yaml", "A curriculum"))
    data = [DataConfig(**tree["data"]) for tree in (stages, ordered, own)]
    assert [(of.step, of.weights) for of in data[0].weights_by_step] == [
        (1, (1, 0)),
        (101, (1, 1)),
        (301, (0, 1)),
    ]
    assert data[1].order_by == "difficulty"
    assert data[2].curriculum == "my_curriculum.py:choose"
    (source,) = examples("python", "A curriculum")
    names: dict[str, Any] = {}
    exec(source, names)
    weights = dict.fromkeys(("easy", "medium", "hard"), 1.0)
    rewards = {"train/easy/reward/mean": 1.0, "train/medium/reward/mean": 0.5}
    for step in range(2, 60):
        weights = names["choose"](step, weights, rewards)
    assert weights["easy"] == pytest.approx(0.01)
    assert weights["medium"] == pytest.approx(0.25, abs=0.01)
    assert weights["hard"] == pytest.approx(1.0), "it gave no prompt"


CHOOSE = """
def choose(step, weights, metrics):
    assert metrics["train/math/share"] + metrics["train/code/share"] == 1
    if step < 4:
        return {"math": 1, "code": weights["code"] + metrics["train/math/reward/mean"]}
    return {"code": 1}
"""


async def test_a_function_chooses_the_weights_once_per_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CHOOSE)
    changes = {**SETS, "data__curriculum": f"{tmp_path}/mine.py:choose"}
    expected = await steps(tmp_path / "whole", FakeServices(), 5, **changes)
    chosen = [event["cursor"].get("chosen") for event in expected.events() if event["event"] == "step"]
    assert chosen[0] is None
    math = [line.get("train/math/reward/mean") for line in expected.lines()]
    assert chosen[1:3] == [[1, 1 + math[1]], [1, 1 + math[1] + math[2]]]
    assert chosen[3:] == [[0, 1]] * 3
    assert by_set(expected)[3:] == ["ccc", "ccc"]
    services = FakeServices()
    for total in (2, 4):
        await steps(tmp_path / "parts", services, total, **changes)
    # What was chosen after step 4 holds for step 5: the function is not asked again.
    (tmp_path / "mine.py").write_text(CHOOSE.replace('{"code": 1}', '{"math": 1}'))
    it = await steps(tmp_path / "parts", services, 5, **changes)
    assert asked(it) == asked(expected)
    assert it.breaches() == []
    findings = Findings()
    follow(read(tmp_path / "parts" / "events.jsonl", findings), findings, it.config)
    assert any("how data.curriculum chose the weights" in unseen for unseen in findings.unseen)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "{'maths': 1}",
            "returned {'maths': 1} after step 1; return a weight of 0 or more for each of math, code",
        ),
        ("{'math': 0}", "one of them above 0"),
        ("{'math': float('nan')}", "returned"),
        ("1 / 0", "raised ZeroDivisionError after step 1: division by zero"),
    ],
)
async def test_what_is_no_weight_ends_the_run(returned: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def choose(step, weights, metrics):\n    return {returned}\n")
    with pytest.raises(ConfigError, match=message):
        await steps(
            tmp_path / "run", FakeServices(), 2, **SETS, data__curriculum=f"{tmp_path}/mine.py:choose"
        )


async def test_the_metrics_say_what_came_of_each_set(tmp_path: Path) -> None:
    it = await steps(tmp_path, FakeServices(), 1, **SETS)
    line, (prompts,) = it.lines()[1], asked(it)
    shares = Counter("math" if prompt < 3 else "code" for prompt in prompts)
    for name, of_set in (("math", [p for p in prompts if p < 3]), ("code", [p for p in prompts if p >= 3])):
        assert line[f"train/{name}/share"] == pytest.approx(shares[name] / 3)
        assert line[f"train/{name}/reward/mean"] == pytest.approx(sum(of_set) / len(of_set) + 0.25)


def test_each_data_source_has_its_share_and_reward(tmp_path: Path) -> None:
    sets = {"a": rows(tmp_path, "a.jsonl", "x", "é,y", "x"), "b": rows(tmp_path, "b.jsonl", "")}
    changes: dict[str, Any] = {"data__train_files": [], "data__data_source_key": "level"}
    inputs = loaded(tmp_path, **changes, data__train_sets=sets)
    rewards = {0: (1.0, 0.0), 1: (0.0, 0.0), 2: (1.0, 1.0), 99: (5.0, 5.0)}
    samples = [
        scored(prompt, index, reward=reward)
        for prompt, group in rewards.items()
        for index, reward in enumerate(group)
    ]
    prompts = {**inputs.train.prompts, 99: inputs.train.prompts[3]}
    metrics = train_metrics.of_origins(samples, prompts, inputs)
    assert metrics == {
        "train/a/share": 0.75,
        "train/a/reward/mean": 0.5,
        "train/b/share": 0.0,
        "train/source/__y/share": 0.25,
        "train/source/__y/reward/mean": 0.0,
        "train/source/x/share": 0.5,
        "train/source/x/reward/mean": 0.75,
        "train/source/none/share": 0.25,
        "train/source/none/reward/mean": 5.0,
    }
    assert all(map(meaning, metrics))
    one_source = loaded(tmp_path, data__train_files=rows(tmp_path, "c.jsonl", "x", "x", "x"))
    assert train_metrics.of_origins(samples[:6], one_source.train.prompts, one_source) == {}
