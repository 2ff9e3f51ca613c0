"""The converter from GSM8K's files to parquet."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from paceline.core.errors import DataError
from paceline.reward.builtin import gsm8k

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_prepare", ROOT / "examples" / "gsm8k" / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, train: list[object], test: list[object]) -> Path:
    for split, rows in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


GOOD = {"question": " How many? \n", "answer": "500+700=<<500+700=1200>>1,200\n#### 1,200"}


def test_rows(prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path, [GOOD, {**GOOD, "answer": "#### -5"}], [GOOD])
    assert prepare.main(["--input", str(source), "--output", str(tmp_path / "out")]) == 0
    assert "train.parquet: 2 prompts" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["ground_truth"] for row in rows] == ["1200", "-5"]
    assert [row["answer"] for row in rows] == ["500+700=1,200\n#### 1,200", "#### -5"]
    assert rows[0]["prompt"] == [{"role": "user", "content": f"How many?\n\n{prepare.INSTRUCTION}"}]
    assert prepare.INSTRUCTION.endswith("#### <number>")
    assert {(row["data_source"], row["split"]) for row in rows} == {("gsm8k", "train")}
    assert pq.read_table(tmp_path / "out" / "test.parquet")["split"].to_pylist() == ["test"]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"question": "q"}, "train.jsonl, line 2: 'answer'; each line"),
        ({"question": "q", "answer": "no number"}, "line 2: gsm8k needs a number"),
        (["q", "a"], "line 2: "),
    ],
)
def test_a_malformed_line_is_named(prepare: ModuleType, tmp_path: Path, bad: object, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        prepare.convert(write(tmp_path, [GOOD, bad], [GOOD]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_and_empty_files(
    prepare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main(["--input", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
    with pytest.raises(DataError, match="is empty"):
        prepare.convert(write(tmp_path, [GOOD], []), tmp_path / "out")


def test_the_full_data_set(prepare: ModuleType, tmp_path: Path) -> None:
    if not (GSM8K / "train.jsonl").exists():
        pytest.skip(f"GSM8K is not there: {GSM8K}")
    assert prepare.convert(GSM8K, tmp_path) == {"train": 7473, "test": 1319}
    answers = [json.loads(line)["answer"] for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    truths = pq.read_table(tmp_path / "train.parquet")["ground_truth"].to_pylist()
    assert all(truth.lstrip("-").isdigit() for truth in truths)
    assert all(gsm8k(answer, truth) == 1.0 for answer, truth in zip(answers, truths, strict=True))
