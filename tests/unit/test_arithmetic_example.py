"""The arithmetic example's generator: right sums, a clean split, the same files for the same seed."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from paceline.config.load import load
from paceline.config.reward import RewardModelConfig
from paceline.config.run import RunConfig
from paceline.core.scoring import ScoreItem
from paceline.reward.builtin import gsm8k
from paceline.reward.judge.question import GradePattern, JudgePrompt

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
NAMES = ("train", "val", "sft")
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def prepare() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("arithmetic_prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def write(prepare: ModuleType, folder: Path, seed: int) -> Rows:
    prepare.write_data(folder, seed=seed, num_train=400, num_val=256, num_sft=2000, hasty_share=0.6)
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in NAMES}


@pytest.fixture(scope="module")
def rows(prepare: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return write(prepare, tmp_path_factory.mktemp("data"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(prepare: ModuleType) -> Any:
    pytest.importorskip("transformers")
    return prepare.build_tokenizer()


def question(row: dict[str, Any]) -> str:
    (message,) = row["prompt"]
    assert message["role"] == "user"
    return str(message["content"])


def operands(row: dict[str, Any]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", question(row))]


def test_ground_truths_are_the_sums_of_the_questions(rows: Rows) -> None:
    for row in (row for name in NAMES for row in rows[name]):
        assert row["ground_truth"] == str(sum(operands(row)))
        assert row["data_source"] == "arithmetic"


def test_no_multiset_of_the_validation_set_is_trained_on(rows: Rows) -> None:
    keys = {name: [tuple(sorted(operands(row))) for row in rows[name]] for name in NAMES}
    assert len(keys["val"]) == 256
    assert len(set(keys["val"])) == 256
    assert not set(keys["val"]) & (set(keys["train"]) | set(keys["sft"]))


def test_every_kind_of_problem_is_there(rows: Rows) -> None:
    kinds = Counter((len(operands(row)), sum(x % 10 for x in operands(row)) // 10) for row in rows["val"])
    assert set(kinds) == {(2, 0), (2, 1), (3, 0), (3, 1)}
    assert min(kinds.values()) >= 15
    carrying = kinds[2, 1] + kinds[3, 1]
    assert 0.55 < carrying / 256 < 0.77
    openings = Counter(re.split(r"\d", question(row))[0] for row in rows["val"])
    assert set(openings) == {"What is ", "Add ", "Find the sum of ", ""}


def test_the_hasty_pupil_is_wrong_exactly_where_something_carries(rows: Rows, prepare: ModuleType) -> None:
    assert prepare.add_without_carry([17, 35]) == 42
    assert prepare.add_without_carry([57, 68]) == 115
    assert prepare.careful_answer([17, 35]) == "units 12: 52"
    hasty = 0
    for row in rows["sft"]:
        score = gsm8k(row["answer"], row["ground_truth"], method="flexible")
        if row["answer"].startswith("units "):
            assert score == 1.0
        else:
            hasty += 1
            assert score == float(sum(x % 10 for x in operands(row)) < 10)
    assert 0.56 < hasty / 2000 < 0.64


def test_the_seed_decides_everything(rows: Rows, prepare: ModuleType, tmp_path: Path) -> None:
    assert write(prepare, tmp_path / "again", seed=0) == rows
    other = write(prepare, tmp_path / "other", seed=1)
    assert all(other[name] != rows[name] for name in NAMES)


def test_what_cannot_be_drawn_is_refused(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(prepare, "OPERAND_RANGE", {2: (10, 19), 3: (10, 19)})
    with pytest.raises(ValueError, match=r"distinct problems, 400 were asked for: ask for fewer rows"):
        prepare.draw_problems(rng, 400, avoid=set(), distinct=True)
    monkeypatch.setattr(prepare, "OPERAND_RANGE", {2: (10, 12), 3: (10, 12)})
    with pytest.raises(ValueError, match="from 10 to 12 carry 1: widen OPERAND_RANGE"):
        prepare.draw_problems(rng, 400, avoid=set(), distinct=False)
    assert prepare.main(["--out", str(tmp_path), "--hasty-share", "1.5"]) == 2


def test_words_and_digits_are_one_token_and_text_comes_back(tokenizer: Any, rows: Rows) -> None:
    ids = tokenizer("Find the sum of 17, 25 and 30.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == (
        ["Find", "Ġthe", "Ġsum", "Ġof", "Ġ", "1", "7", ",", "Ġ", "2", "5", "Ġand", "Ġ", "3", "0", "."]
    )
    for text in [*map(question, rows["val"]), "units 12: 52", "Füße, 3 < 4\n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_marks_roles_and_ends_answers(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Add 17 and 25."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>Add 17 and 25.<|assistant|>"
    chat.append({"role": "assistant", "content": "42"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == prompt + "42<|end|>"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_rows_fit_the_limits_of_the_shipped_configurations(tokenizer: Any, rows: Rows) -> None:
    prompts = [
        tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for name in NAMES
        for row in rows[name]
    ]
    answers = [tokenizer(row["answer"])["input_ids"] for row in rows["sft"]]
    longest = max(map(len, prompts)), max(map(len, answers)) + 1
    assert longest == (18, 9)
    for name in ("sft", "ppo", "grpo"):
        data = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())["data"]
        assert data["max_prompt_length"] >= longest[0]
        assert data["max_response_length"] >= longest[1]


@pytest.fixture(scope="module")
def verdicts(prepare: ModuleType) -> list[dict[str, Any]]:
    problems = prepare.draw_problems(np.random.default_rng(1), 1000, avoid=set(), distinct=False)
    table: list[dict[str, Any]] = prepare.to_verdicts(problems, np.random.default_rng(2)).to_pylist()
    return table


@pytest.fixture(scope="module")
def judge() -> RewardModelConfig:
    (model,) = load(RunConfig, EXAMPLE / "ppo_examiner.yaml").reward.models
    return model


def test_the_examiner_is_taught_what_it_will_be_asked_and_the_checkers_verdict(
    verdicts: list[dict[str, Any]], judge: RewardModelConfig
) -> None:
    question = JudgePrompt((EXAMPLE / "judge.txt").read_text(encoding="utf-8"))
    grade = GradePattern(judge.pattern, judge.words)
    right = 0
    for row in verdicts:
        (message,) = row["prompt"]
        item = ScoreItem(
            trajectory_id="t", prompt=row["question"], response=row["response"], ground_truth="99"
        )
        assert message == {"role": "user", "content": question.about(item)}
        exact = gsm8k(row["response"], row["ground_truth"], method="flexible")
        assert grade.of(row["answer"]) == exact
        own = re.fullmatch(r"units \d+: (\d+)(?: (\d+))? (?:yes|no)", row["answer"])
        assert own is not None
        assert own[1] == row["ground_truth"]
        assert own[2] == (re.findall(r"\d+", row["response"]) or [None])[-1]
        right += exact == 1
    assert 0.35 < right / len(verdicts) < 0.5


def test_the_examiner_sees_answers_of_every_kind(verdicts: list[dict[str, Any]], prepare: ModuleType) -> None:
    kinds = Counter(
        (
            bool(re.fullmatch(r"units \d+: \d+|\d+", row["response"])),
            ":" in row["response"],
            row["answer"][-2:],
        )
        for row in verdicts
    )
    written = {(regular, careful): 0 for regular in (True, False) for careful in (True, False)}
    for (regular, careful, _), count in kinds.items():
        written[regular, careful] += count
    assert min(written.values()) > 10
    assert all(kinds[True, careful, verdict] > 30 for careful in (True, False) for verdict in ("es", "no"))


def test_verdicts_are_held_out_and_fit_the_configurations(
    prepare: ModuleType, tokenizer: Any, tmp_path: Path, judge: RewardModelConfig
) -> None:
    prepare.write_data(tmp_path, seed=0, num_train=9, num_val=64, num_sft=9, num_pairs=400, hasty_share=0.6)
    seen, held_out = (
        pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("verdicts", "verdicts_val")
    )
    keys = [{tuple(sorted(re.findall(r"\d+", row["question"]))) for row in rows} for rows in (seen, held_out)]
    assert not keys[0] & keys[1]
    assert len(keys[1]) == 64
    data = yaml.safe_load((EXAMPLE / "examiner.yaml").read_text())["data"]
    for row in (*seen, *held_out):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = tokenizer(row["answer"])["input_ids"]
        assert len(prompt) <= data["max_prompt_length"]
        assert len(answer) + 1 <= min(data["max_response_length"], judge.max_tokens)


def test_a_judges_agreement_is_counted_by_kind() -> None:
    agreement = runpy.run_path(str(EXAMPLE / "agreement.py"))
    grades = [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (None, 1.0)]
    assert agreement["agreement"](grades) == {
        "agreed": 0.4, "wrongly yes": 0.2, "wrongly no": 0.2, "no grade": 0.2,
    }  # fmt: skip
    assert agreement["of_step"](['{"examiner": 1.0, "gsm8k": 0.0}']) == [(1.0, 0.0)]


@pytest.mark.torch
def test_the_model_is_seeded_and_splits_over_two_ranks(prepare: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert prepare.write_model(tmp_path / "a", seed=3) == 1_026_176
    prepare.write_model(tmp_path / "b", seed=3)
    prepare.write_model(tmp_path / "c", seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in a.values()} == {torch.float32}

    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    for key in ("num_attention_heads", "num_key_value_heads"):
        assert config[key] % 2 == 0
    for key in ("hidden_size", "intermediate_size", "vocab_size"):
        assert config[key] % 64 == 0
    # The tokenizer must be loaded as it was saved: AutoTokenizer chooses the class by the model's type.
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert loaded("Add 17 and 25.")["input_ids"] == prepare.build_tokenizer()("Add 17 and 25.")["input_ids"]
    assert (loaded.eos_token_id, len(loaded)) == (config["eos_token_id"], 292)
