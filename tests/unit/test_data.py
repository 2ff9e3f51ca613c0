"""Rows, chat templates, filtering: what is read, and what each fault says."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.checks.data_checks import training_line
from paceline.config.data import DataConfig
from paceline.controller.batch.inputs import load_inputs
from paceline.core.errors import DataError, ModelError
from paceline.data.prompts import PromptSet, encode_prompt, load_tokenizer, stop_token_ids
from paceline.data.reading.prompt_reader import PromptReader
from paceline.data.rows import read_rows
from support.byte_tokenizer import save_tokenizer
from support.learner_fakes import run_config


class Words:
    """A tokenizer of one id a word; its chat template marks roles with brackets."""

    eos_token_id: int | None = 9
    chat_template: str | None = "yes"

    def __call__(self, text: str | list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        if isinstance(text, list):
            return {
                "input_ids": [self(of, add_special_tokens=add_special_tokens)["input_ids"] for of in text]
            }
        ids = [len(word) for word in text.split()]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return " ".join(f"<{m['role']}> {m['content']}" for m in conversation) + " <assistant>"

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def config(files: Path, **changes: Any) -> DataConfig:
    return DataConfig(train_files=(str(files),), **changes)


def loaded(data: DataConfig) -> PromptSet:
    return PromptReader(data=data, tokenizer=Words()).read(data.training_sets[0])


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a b", "ground_truth": "1"}, {"prompt": "c", "ground_truth": "2"}]
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    assert read_rows([parquet]) == read_rows([jsonl(tmp_path, rows)]) == rows


def test_filtering_counts_and_keeps_ids(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "w " * n, "ground_truth": str(n), "level": n} for n in (1, 9, 2)])
    prompts = loaded(config(file, max_prompt_length=3, extra_keys=("level",)))
    assert prompts.ids() == [0, 2]
    assert (len(prompts.prompts), prompts.num_filtered) == (2, 1)
    assert prompts.prompts[2].context.extra == {"level": 2}
    with pytest.raises(
        DataError, match=r"1 of 3 training prompts .* longer than data.max_prompt_length=3 .*row 1 has 10"
    ):
        loaded(config(file, max_prompt_length=3, overlong_prompts="error"))
    with pytest.raises(DataError, match="none of the 3 training prompts fits"):
        loaded(config(file, max_prompt_length=1))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_dotted_key_leads_into_a_nested_column(tmp_path: Path, kind: str) -> None:
    """verl's rows have the ground truth below reward_model."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": "a b",
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "info": {"deep": {"level": 3}},
        },
        {
            "prompt": "c",
            "reward_model": {"style": "rule", "ground_truth": "8"},
            "info": {"deep": {"level": 4}},
        },
    ]
    file = jsonl(tmp_path, rows)
    if kind == "parquet":
        file = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    data = config(file, ground_truth_key="reward_model.ground_truth", extra_keys=("info.deep.level",))
    contexts = [prompt.context for prompt in loaded(data).prompts.values()]
    assert [context.ground_truth for context in contexts] == ["7", "8"]
    assert [context.extra for context in contexts] == [{"info.deep.level": 3}, {"info.deep.level": 4}]
    with pytest.raises(DataError, match=r"no column 'ground_truth'; it has .*reward_model\.ground_truth"):
        loaded(config(file))
    with pytest.raises(DataError, match=r"no column 'reward_model\.truth'"):
        loaded(config(file, ground_truth_key="reward_model.truth"))


def test_a_column_with_a_dot_in_its_own_name_comes_first(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "a", "x.y": "1", "x": {"y": "2"}}])
    prompts = loaded(config(file, ground_truth_key="x.y"))
    assert prompts.prompts[0].context.ground_truth == "1"


def test_chat_and_text() -> None:
    messages = [{"role": "user", "content": "hi you"}]
    assert encode_prompt(Words(), messages, "auto") == [6, 2, 3, 11]
    assert encode_prompt(Words(), "hi you", "chat") == [6, 2, 3, 11]
    assert encode_prompt(Words(), "hi you", "auto") == [0, 2, 3]
    with pytest.raises(DataError, match="data.prompt_format is text"):
        encode_prompt(Words(), messages, "text")
    with pytest.raises(DataError, match="list of {role, content} messages"):
        encode_prompt(Words(), [{"who": "x"}], "auto")
    bare = Words()
    bare.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        encode_prompt(bare, messages, "auto")


def test_a_system_prompt_stands_before_every_prompt_without_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "be so kind"}, {"role": "user", "content": "c"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "ab", "ground_truth": "1"},
        {"prompt": [{"role": "user", "content": "c"}], "ground_truth": "2"},
        {"prompt": own, "ground_truth": "3"},
    ]
    file = jsonl(tmp_path, rows)
    prompts = loaded(config(file, system_prompt="think hard")).prompts
    system, user, assistant = len("<system>"), len("<user>"), len("<assistant>")
    assert [list(prompt.token_ids) for prompt in prompts.values()] == [
        [system, 5, 4, user, 2, assistant],
        [system, 5, 4, user, 1, assistant],
        [system, 2, 2, 4, user, 1, assistant],
    ]
    first = {"role": "system", "content": "think hard"}
    assert prompts[0].messages == (first, {"role": "user", "content": "ab"})  # what further turns go on from
    assert prompts[2].messages == tuple(own)
    assert [prompt.context.prompt_text for prompt in prompts.values()] == ["ab", "c", "c"]
    plain = loaded(config(file)).prompts
    assert list(plain[0].token_ids) == [0, 2]
    assert list(plain[1].token_ids) == [user, 1, assistant]


def test_a_chat_template_gets_what_the_configuration_names(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    own = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{{ messages[0].content }}{% if not (thinks | default(true)) %} no{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, "chat_template": template}))
    messages = [{"role": "user", "content": "hi"}]
    for given, text in (({}, "hi"), ({"thinks": True}, "hi"), ({"thinks": False}, "hi no")):
        tokenizer = load_tokenizer(folder, given)
        token_ids = encode_prompt(tokenizer, messages, "auto")
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    file = jsonl(tmp_path, [{"prompt": messages, "ground_truth": "1"}] * 8)
    data = {"train_files": str(file), "chat_template_kwargs": {"thinks": False}}
    run = run_config(folder, data=data)
    assert list(load_inputs(run).train.prompts[0].token_ids) == token_ids
    assert "hi no" in training_line(run)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"system_prompt": "x", "prompt_format": "text"}, "system_prompt is for chat prompts"),
        ({"chat_template_kwargs": {"a": 1}, "prompt_format": "text"}, "chat_template_kwargs is for chat"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools is set by Paceline"),
        ({"system_prompt": ""}, "at least 1 character"),
    ],
)
def test_what_no_template_would_get_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(Path("x.jsonl"), **given)


def test_the_first_rows_alone_are_trained_on(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "a", "ground_truth": str(n)} for n in range(5)])
    data = config(file, train_max_prompts=2)
    assert loaded(data).ids() == [0, 1]
    (held_out,) = run_config(tmp_path, data={"val_files": str(file)}).held_out_sets
    assert PromptReader(data=data, tokenizer=Words()).read(held_out).ids() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "no.jsonl", "does not exist"),
        ("", "e.jsonl", "no rows in"),
        ("{oops", "b.jsonl", "line 1, is not JSON"),
        ("[1]", "l.jsonl", "every line must be an object"),
        ('{"prompt": "x"}', "c.jsonl", "has no column 'ground_truth'; it has prompt"),
        ('{"prompt": null, "ground_truth": "1"}', "n.jsonl", "row 0 has no value in column 'prompt'"),
        ("x", "t.txt", "cannot tell the format from '.txt'"),
        ("not parquet", "p.parquet", "is not readable as parquet"),
        ('{"prompt": [], "ground_truth": "1"}', "m.jsonl", "row 0: a prompt must be a string or a list"),
        ('{"prompt": "x", "ground_truth": NaN}', "nan.jsonl", "row 0 has no value in column 'ground_truth'"),
        ("[" * 100_000, "deep.jsonl", "line 1, is not JSON"),
        ('{"prompt": "x", "ground_truth": "\udcff"}', "latin.jsonl", "line 1, is not JSON"),
        (
            '{"prompt": "a", "ground_truth": "1"}\n{"prompt": "x", "ground_truth": Infinity}',
            "inf.jsonl",
            "row 1: column 'ground_truth' holds an infinity; change it, or leave the column out",
        ),
    ],
)
def test_faults_say_what_to_change(tmp_path: Path, content: str | None, name: str, said: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError) as caught:
        loaded(config(file))
    assert said in str(caught.value)


def test_every_column_becomes_plain_data(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    when = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    extra = {
        "day": when.date(),
        "moment": when,
        "span": datetime.timedelta(seconds=1.5),
        "price": Decimal("2.50"),
        "count": Decimal("7"),
        "score": math.nan,
        "raw": b"text",
        "nested": {"list": [{"day": when.date(), "score": math.nan}]},
    }
    file = tmp_path / "rows.parquet"
    row = {"prompt": "a b", "ground_truth": when.date(), **extra}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    context = loaded(config(file, extra_keys=tuple(extra))).prompts[0].context
    assert context.ground_truth == "2024-02-29"
    assert context.extra == {
        "day": "2024-02-29",
        "moment": "2024-02-29T12:30:00+00:00",
        "span": 1.5,
        "price": 2.5,
        "count": 7,
        "score": None,
        "raw": "text",
        "nested": {"list": [{"day": "2024-02-29", "score": None}]},
    }


def test_lone_surrogates_of_a_data_file_are_escaped(tmp_path: Path) -> None:
    row = {"prompt": "a \ud800", "ground_truth": "\udfff", "data_source": "\ud801", "level": ["\ud802"]}
    file = jsonl(tmp_path, [row])
    context = loaded(config(file, extra_keys=("level",))).prompts[0].context
    assert (context.prompt_text, context.ground_truth) == ("a \\ud800", "\\udfff")
    assert (context.data_source, context.extra) == ("\\ud801", {"level": ["\\ud802"]})


def test_a_folder_without_tokenizer_and_a_model_without_end(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ModelError, match=r"has no tokenizer \(tokenizer.json\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert stop_token_ids(tmp_path, Words()) == (3, 5, 9)
    endless = Words()
    endless.eos_token_id = None
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        stop_token_ids(tmp_path, endless)
