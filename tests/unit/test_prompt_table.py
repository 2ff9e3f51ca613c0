"""Tokens of large sets of prompts: made once, kept, and the same as those that are made anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from paceline.cli.commands.start import train
from paceline.cli.main import main
from paceline.data.prompts import PromptFacts, encode_prompt, load_tokenizer
from paceline.data.reading import prompt_reader, prompt_table
from paceline.data.reading.prompt_reader import PromptReader
from paceline.launch.outcome import LaunchOutcome
from support.byte_tokenizer import save_tokenizer
from support.cli_configs import config

ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "ground_truth": "1", "level": 2, "data_source": "a", "note": "x"},
    {"prompt": [{"role": "user", "content": "two"}], "ground_truth": "2", "level": 1, "data_source": "b"},
    {"prompt": "far too long for eight tokens", "ground_truth": "3", "level": 0, "data_source": "c"},
    {"prompt": "four", "ground_truth": "4", "level": 2, "data_source": "a"},
]
ROWS = [{"note": None, **row} for row in ROWS]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and rows; all sets with a row are large ones."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(prompt_reader, "KEPT_FROM", 1)
    save_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def reader(folder: Path, **changes: Any) -> PromptReader:
    data = {"train_files": [str(folder / "rows.jsonl")], "max_prompt_length": 8, **changes}
    return PromptReader.of(config(data=data, model={"path": str(folder / "model")}))


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "prompts").glob("*"))


def test_kept_tokens_are_those_of_each_row_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [reader(folder, order_by="level", extra_keys=["note"]).training()[""]]
    assert len(kept(folder)) == 1
    monkeypatch.setattr(PromptReader, "_encoded", None)  # Nothing is tokenized the second time.
    made.append(reader(folder, order_by="level", extra_keys=["note"]).training()[""])
    tokenizer = load_tokenizer(folder / "model")
    for prompts in made:
        assert prompts.ids() == [0, 1, 3]
        for prompt_id, prompt in prompts.prompts.items():
            row = ROWS[prompt_id]
            assert prompt.token_ids.tolist() == encode_prompt(tokenizer, row["prompt"], "auto")
            assert (prompt.prompt_id, prompt.context.ground_truth) == (prompt_id, row["ground_truth"])
            assert prompt.context.extra == {"note": row["note"]}
        assert prompts.prompts[0] is prompts.prompts[0]
        assert 2 not in prompts.prompts
        assert (prompts.num_rows, prompts.num_filtered) == (4, 1)
        assert prompts.ranks is not None
        assert sorted(prompts.ranks, key=prompts.ranks.__getitem__) == [1, 0, 3]
        of_each = PromptFacts.of(prompts.prompts)
        for name in ("sources", "first_text", "longest", "largest_size"):
            assert getattr(prompts.facts, name) == getattr(of_each, name), name
    assert made[0].facts == made[1].facts


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_format": "text", "prompt_key": "ground_truth"},
        {"system_prompt": "s"},
        {"chat_template_kwargs": {"deep": True}},
        {"ground_truth_key": "prompt"},
        {"data_source_key": None},
        {"extra_keys": ["note"]},
        {"order_by": "level"},
        {"train_max_prompts": 2},
        "a row",
        "the tokenizer",
        "the template",
    ],
)
def test_what_tokens_follow_from_is_in_their_key(changes: dict[str, Any] | str, folder: Path) -> None:
    before = reader(folder).training()[""].facts.digest
    again = reader(folder, max_prompt_length=9, seed=4, shuffle=False).training()[""]
    assert (len(kept(folder)), again.facts.digest) == (1, before), "the same tokens"
    if changes == "a row":
        text = (folder / "rows.jsonl").read_text()
        (folder / "rows.jsonl").write_text(text.replace('"4"', '"5"'))
    elif changes == "the tokenizer":
        file = folder / "model" / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "note": 1}))
    elif changes == "the template":
        (folder / "model" / "chat_template.jinja").write_text(TEMPLATE.replace(">", "}"))
    given = changes if isinstance(changes, dict) else {}
    reader(folder, **given).training()
    assert len(kept(folder)) == 2


def test_a_table_that_is_damaged_is_made_anew(folder: Path) -> None:
    before = reader(folder).training()[""].facts
    (file,) = kept(folder)
    for damage in (b"", b"ARROW1", file.read_bytes()[:300]):
        file.write_bytes(damage)
        assert reader(folder).training()[""].facts == before
        assert file.stat().st_size > 300


def test_the_least_recently_used_tables_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (2, 3):
        reader(folder, train_max_prompts=limit).training()
    reader(folder, train_max_prompts=2).training()
    used, _ = sorted(kept(folder), key=lambda file: -file.stat().st_mtime_ns)
    monkeypatch.setattr(prompt_table, "_MOST_BYTES", used.stat().st_size * 5 // 2)
    reader(folder).training()
    assert len(kept(folder)) == 2
    assert used in kept(folder)


def test_without_room_for_tables_there_are_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "cache").write_text("a file")
    assert len(reader(folder).training()[""].prompts) == 3
    assert "tokenized prompts are not kept" in caplog.text


def test_rows_are_decoded_from_any_file_when_they_are_asked_for(folder: Path) -> None:
    parquet = folder / "more.parquet"
    rows = [{"prompt": f"p{n}", "ground_truth": str(n)} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet, row_group_size=2)
    files = [str(folder / "rows.jsonl"), str(parquet), str(folder / "rows.jsonl")]
    for _ in range(2):
        prompts = reader(folder, train_files=files).training()[""].prompts
        truths = [prompt.context.ground_truth for prompt in prompts.values()]
        assert truths == ["1", "2", "4", *"01234", "1", "2", "4"]


def test_the_terminal_says_what_is_read_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def launch(*_: object, **__: object) -> LaunchOutcome:
        return LaunchOutcome(ok=False, message="the end", exit_code=2, began=False)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "launch", launch)
    monkeypatch.setattr(train, "log_to", lambda file: None)
    monkeypatch.setattr(train, "quick_check", lambda config: None)
    monkeypatch.setattr("paceline.data.reading.epochs.KEPT_FROM", 4)
    monkeypatch.setattr(prompt_reader, "_CHUNK", 2)
    monkeypatch.setattr(prompt_reader, "_TELL_EVERY_S", -1)
    (folder / "run.yaml").write_text(
        "data: {train_files: rows.jsonl, train_batch_size: 2, max_prompt_length: 8}\n"
        "model: {path: model}\nactor: {ppo_mini_batch_size: 2}\n"
        "reward: {functions: [{name: exact_match}]}\ntrainer: {total_steps: 1}\n"
    )
    assert main(["train", "run.yaml"]) == 2
    out = capsys.readouterr().out
    for said in ("reading 4 training prompts", "tokenized 2 of 4 training", "tokenized 4 of 4 training"):
        assert f"note: {said}" in out
    assert main(["train", "run.yaml"]) == 2
    out = capsys.readouterr().out
    assert "reading 4 training prompts" in out
    assert "tokenized" not in out
    monkeypatch.setattr("paceline.data.reading.epochs.KEPT_FROM", 5)
    assert main(["train", "run.yaml"]) == 2
    assert "reading" not in capsys.readouterr().out
