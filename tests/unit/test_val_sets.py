"""Sets of held-out prompts: their rows, how they are answered, when, and what is said of the answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import yaml

from paceline.config.load import dump_yaml, parse
from paceline.config.run import RunConfig
from paceline.controller.batch.inputs import HeldOutPrompts, load_inputs
from paceline.controller.run.records import val_metrics
from paceline.core.errors import ConfigError
from paceline.core.ids import Purpose
from paceline.core.run_record.step_metrics import STEP_METRICS, meaning
from paceline.core.samples.evaluation import final_answer
from paceline.core.samples.trajectory import FinishReason, PromptGroup, RewardContext, SamplingSpec
from paceline.data.hub import uses_hub
from paceline.data.prompts import Prompt, PromptSet
from support.byte_tokenizer import save_tokenizer
from support.fake_fleet import score_all
from support.headers import scored
from support.sequencer_run import config, run

HARD: dict[str, Any] = {
    "files": "hard.jsonl",
    "n": 3,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 40,
    "max_response_length": 900,
    "every": 2,
}
SETS: dict[str, Any] = {"data__val_sets": {"easy": "easy.jsonl", "hard": HARD}}


def test_what_a_set_leaves_out_is_that_of_the_run() -> None:
    general = {"n": 2, "temperature": 1.0, "top_p": 0.7, "top_k": 5, "right_above": 0.5}
    unnamed, easy, hard = config(**SETS, rollout__val=general).held_out_sets
    for held_out, file in ((unnamed, "v.jsonl"), (easy, "easy.jsonl")):
        assert (held_out.files, held_out.max_tokens, held_out.every) == ((file,), 512, 1)
        assert {name: getattr(held_out, name) for name in general} == general
    assert (hard.n, hard.temperature, hard.top_p, hard.top_k) == (3, 0.6, 0.95, 40)
    assert (hard.max_tokens, hard.right_above) == (900, 0.5)
    assert [held_out.metrics for held_out in (unnamed, hard)] == ["val/", "val/hard/"]


def test_engines_have_room_for_the_longest_response_and_the_learner_for_those_that_train() -> None:
    it = config(**SETS, data__max_prompt_length=100)
    assert (it.max_model_len, it.engine_model_len) == (612, 1000)
    assert (it.request_timeout_s, config(data__max_response_length=4000).request_timeout_s) == (600, 800)
    longer = config(data__val_sets={"hard": {**HARD, "max_response_length": 4000}})
    assert longer.request_timeout_s == 800


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (None, {0: 3, 7: 3}),
        (0, {0: 3}),
        (2, {0: 3, 2: 2, 4: 3, 6: 2, 7: 3}),
    ],
)
def test_a_set_takes_part_as_often_as_it_says(freq: int | None, expected: dict[int, int]) -> None:
    it = config(**SETS, trainer__test_freq=freq, trainer__total_steps=7)
    assert {step: len(it.validated_after(step)) for step in range(8) if it.validated_after(step)} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__val_sets": {"reward": "x.jsonl"}}, "'reward' cannot name a set, because metrics use it"),
        ({"data__val_sets": {"a/b": "x.jsonl"}}, "'a/b' cannot name a set; write letters"),
        ({"data__val_sets": {"a": {"n": 4}}}, "data.val_sets.a.files is required"),
        (
            {"data__val_sets": {"a": {"files": "x", "n": 4}}},
            "data.val_sets.a: 4 samples per prompt .* set data.val_sets.a.temperature",
        ),
        (
            {"data__val_sets": {"a": {"files": "x", "max_response_length": 9}}, "rollout__tools": ["t.py:f"]},
            "data.val_sets.a.max_response_length: the limits of episodes",
        ),
        (
            {"data__val_sets": {"a": {"files": "x", "reward": {}}}},
            "data.val_sets.a.reward has no scorer: name one",
        ),
        (
            {"data__val_sets": {"a": {"files": "x", "reward": {"attached": [{"name": "b"}]}}}},
            "unknown key data.val_sets.a.reward.attached",
        ),
        (
            {
                "data__val_sets": {
                    "a": {"files": "x", "reward": {"functions": [{"name": "gsm8k", "normalize": "batch"}]}}
                }
            },
            "data.val_sets.a: reward: gsm8k has normalize=batch, which only training does",
        ),
        (
            {
                "data__val_sets": {
                    "a": {
                        "files": "x",
                        "n": 5,
                        "temperature": 1,
                        "reward": {
                            "services": [
                                {"name": "s", "address": "h:1", "group": True, "max_items_per_call": 4}
                            ]
                        },
                    }
                }
            },
            "the reward service 's' gets the samples of a prompt in one call .* raise it to 5",
        ),
    ],
)
def test_sets_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_a_set_with_a_reward_of_its_own_shares_the_limits_of_the_runs() -> None:
    general = {
        "functions": [{"name": "exact_match"}],
        "attached": [{"name": "judge"}],
        "models": [{"name": "rm", "path": "rm"}],
        "timeout_s": 3.0,
        "num_processes": 2,
        "environment_weight": 0.5,
    }
    ranked = {"functions": [{"name": "own.py:rank", "group": True, "weight": 2}], "environment_weight": 0.25}
    sets = {
        "easy": "easy.jsonl",
        "hard": {"files": "hard.jsonl", "reward": "own.py:score"},
        "ranked": {"files": "ranked.jsonl", "reward": ranked},
    }
    of_run = {f"reward__{key}": value for key, value in general.items()}
    it = config(data__val_sets=sets, **of_run)
    assert list(it.rewards) == ["", "hard", "ranked"]
    assert it.rewards[""] == it.reward
    assert [[*reward.named_scorers] for reward in it.rewards.values()] == [
        ["exact_match", "judge", "rm"],
        ["score"],
        ["rank"],
    ]
    limits = {(r.timeout_s, r.num_processes, r.model_gpus) for r in it.val_rewards.values()}
    assert limits == {(3.0, 2, frozenset())}
    assert [reward.environment_weight for reward in it.rewards.values()] == [0.5, 1.0, 0.25]
    assert it.own_code == {
        "data.val_sets.hard.reward.functions[0]": "own.py:score",
        "data.val_sets.ranked.reward.functions[0]": "own.py:rank",
    }
    assert it.scores_groups, "the samples of a prompt travel together for one set's scorer"
    assert not config(data__val_sets={**sets, "ranked": "ranked.jsonl"}, **of_run).scores_groups
    again = parse(RunConfig, yaml.safe_load(dump_yaml(it)))
    assert again == it, "as a resumed run reads it"


def test_a_set_may_be_on_the_hub() -> None:
    assert uses_hub(config(data__val_sets={"gsm8k": "openai/gsm8k:main:test"}))
    assert not uses_hub(config(**SETS))


def test_each_set_has_its_own_rows_and_no_number_twice(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 3}')

    def rows(name: str, *prompts: str) -> str:
        lines = [json.dumps({"prompt": prompt, "ground_truth": prompt.upper()}) for prompt in prompts]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    changes: dict[str, Any] = {
        "data__train_files": rows("t.jsonl", "t", "u", "v"),
        "data__val_files": rows("v.jsonl", "a", "longer than eight tokens"),
        "data__val_sets": {
            "easy": rows("easy.jsonl", "b", "c", "d"),
            "hard": {**HARD, "files": [rows("hard.jsonl", "e"), rows("more.jsonl", "f")]},
        },
        "data__max_prompt_length": 8,
        "model__path": str(tmp_path / "model"),
    }
    inputs = load_inputs(config(**changes))
    truths = {
        held_out.of.name: {i: prompt.context.ground_truth for i, prompt in held_out.prompts.prompts.items()}
        for held_out in inputs.val
    }
    assert truths == {"": {0: "A"}, "easy": {2: "B", 3: "C", 4: "D"}, "hard": {5: "E", 6: "F"}}
    without = load_inputs(config(**{**changes, "data__val_sets": {"easy": str(tmp_path / "easy.jsonl")}}))
    assert without.digest != inputs.digest
    assert load_inputs(config(**changes)).digest == inputs.digest


async def test_servers_are_asked_for_what_each_set_says(tmp_path: Path) -> None:
    groups: dict[tuple[int, int], PromptGroup] = {}

    def answer(group: PromptGroup, index: int) -> dict[str, Any]:
        assert group.purpose == Purpose.VALIDATE or not group.context.val_set
        if group.purpose == Purpose.VALIDATE:
            groups[group.step, group.prompt_id] = group
        return score_all(group, index)

    changes = {**SETS, "trainer__test_freq": 1, "trainer__total_steps": 3}
    changes["data__val_sets"] = {"easy": "easy.jsonl", "hard": {**HARD, "max_prompts": 1}}
    async with run(tmp_path, **changes) as it:
        await it.enlist_all()
        await it.go(answer)
        lines, breaches = it.lines(), it.breaches()
    assert breaches == []
    plain = SamplingSpec(temperature=0.0, max_tokens=512, stop_token_ids=(0,))
    hard = SamplingSpec(temperature=0.6, max_tokens=900, top_p=0.95, top_k=40, stop_token_ids=(0,))
    asked = {key: (group.num_samples, group.sampling) for key, group in groups.items()}
    often = {(step, prompt): (1, plain) for step in range(4) for prompt in (0, 1, 2, 3)}
    names = {(groups[key].prompt_id, groups[key].context.val_set) for key in groups}
    assert names == {(0, ""), (1, ""), (2, "easy"), (3, "easy"), (4, "hard")}
    assert asked == often | {(step, 4): (3, hard) for step in (0, 2, 3)}
    assert [line["step"] for line in lines if "val/hard/reward/mean" in line] == [0, 2, 3]
    assert [line["step"] for line in lines if "val/easy/reward/mean" in line] == [0, 1, 2, 3]
    assert [lines[0][f"val/{of}num_prompts"] for of in ("", "easy/", "hard/")] == [2, 2, 1]
    # The reward of an answer is its number: two of three answers are right.
    assert lines[2]["val/hard/reward/mean"] == 1.0
    assert lines[2]["val/hard/avg_at_3"] == pytest.approx(2 / 3)
    assert lines[2]["val/hard/pass_at_2"] == 1.0
    file = pyarrow.parquet.read_table(tmp_path / "trajectories" / "val_000002.parquet").to_pylist()
    assert [(row["val_set"], row["prompt_id"], row["sample_index"]) for row in file] == [
        *(("", prompt, 0) for prompt in (0, 1)),
        *(("easy", prompt, 0) for prompt in (2, 3)),
        *(("hard", 4, sample) for sample in range(3)),
    ]
    trained = pyarrow.parquet.read_table(tmp_path / "trajectories" / "step_000001.parquet").to_pylist()
    assert {row["val_set"] for row in trained} == {None}


def held_out(sources: str) -> HeldOutPrompts:
    """A set with a prompt of each source."""
    (of,) = config(data__val_files=[], data__val_sets={"hard": {**HARD, "right_above": 0.5}}).held_out_sets
    prompts = {
        number: Prompt(
            prompt_id=number,
            token_ids=np.zeros(1, dtype=np.int32),
            context=RewardContext(ground_truth="", data_source=source.strip()),
        )
        for number, source in enumerate(sources)
    }
    return HeldOutPrompts(of=of, prompts=PromptSet(prompts=prompts, num_filtered=0))


def test_the_answers_to_a_set_are_measured_by_prompt_and_by_source() -> None:
    rewards = {0: (1.0, 1.0, 0.2), 1: (0.0, 0.5, 0.0), 2: (0.6, 0.0, 0.0)}
    samples = [
        scored(prompt, index, purpose=Purpose.VALIDATE, reward=reward, finish_reason=finish)
        for prompt, group in rewards.items()
        for index, (reward, finish) in enumerate(
            zip(group, [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP], strict=True)
        )
    ]
    texts = {0: ("#### 4", "4.", "5"), 1: ("", "", ""), 2: ("7", "8", "8")}
    finals = {
        s.trajectory_id: final_answer(texts[s.trajectory_id.prompt_id][s.trajectory_id.sample_index])
        for s in samples
    }
    batch = SimpleNamespace(
        samples=samples, dropped=[SimpleNamespace(prompt_id=3), SimpleNamespace(prompt_id=9)]
    )
    metrics = val_metrics.of_sets([held_out("aaéé")], batch, finals)  # type: ignore[arg-type]
    assert {name: round(value, 3) for name, value in metrics.items() if "/source/" not in name} == {
        "val/hard/num_prompts": 3.0,
        "val/hard/groups_dropped": 1.0,
        "val/hard/reward/mean": 0.367,
        "val/hard/reward/low": 0.167,
        "val/hard/reward/high": 0.733,
        "val/hard/avg_at_3": 0.333,
        "val/hard/pass_at_2": 0.556,
        "val/hard/pass_at_3": 0.667,
        "val/hard/maj_at_3": 0.333,
        "val/hard/cut_off": 0.333,
        "val/hard/response_length/mean": 2.0,
    }
    by_source = {name: value for name, value in metrics.items() if name.endswith("pass_at_3")}
    assert by_source == {
        "val/hard/pass_at_3": pytest.approx(2 / 3),
        "val/hard/source/a/pass_at_3": 0.5,
        "val/hard/source/_/pass_at_3": 1.0,
    }
    said = {meaning(name) for name in metrics}
    assert "" not in said
    documented = {text for name, text in STEP_METRICS.items() if name.startswith("val/")}
    assert documented - said == {STEP_METRICS["val/NAME/mean"], STEP_METRICS["val/episode/NAME"]}
    without = val_metrics.of_sets([held_out("aaaa")], batch, {})  # type: ignore[arg-type]
    assert not [name for name in without if "maj_at" in name or "source" in name]
    assert without["val/hard/reward/mean"] == metrics["val/hard/reward/mean"]


def test_a_set_of_which_nothing_was_scored_says_so() -> None:
    batch = SimpleNamespace(samples=[], dropped=[SimpleNamespace(prompt_id=0)])
    metrics = val_metrics.of_sets([held_out("a")], batch, {})  # type: ignore[arg-type]
    assert metrics == {"val/hard/num_prompts": 0.0, "val/hard/groups_dropped": 1.0}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("val/gsm8k/reward/mean", "val/reward/mean"),
        ("val/gsm8k/maj_at_16", "val/maj_at_NUMBER"),
        ("val/maj_at_16", "val/maj_at_NUMBER"),
        ("val/gsm8k/mean", "val/NAME/mean"),
        ("val/gsm8k/exact_match/mean", "val/NAME/mean"),
        ("val/gsm8k/episode/turns/mean", "val/episode/NAME"),
        ("val/gsm8k/source/openai/gsm8k/reward/low", "val/source/SOURCE/NAME"),
        ("val/source/a/avg_at_4", "val/source/SOURCE/NAME"),
    ],
)
def test_the_metrics_of_a_set_have_the_meaning_of_the_unnamed_ones(name: str, known: str) -> None:
    assert meaning(name) == STEP_METRICS[known]
