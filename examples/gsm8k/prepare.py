"""Converts GSM8K's own files (`train.jsonl`, `test.jsonl`: `question` and `answer`) to prompts in parquet.

Each row has the question as a chat message that asks for the answer format of the `gsm8k` reward, the final
number in plain digits, the written solution for `paceline sft`, and the row's origin. The rows keep their
order.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.core.errors import DataError
from paceline.reward.builtin.grade_school import extract_answer

HERE = Path(__file__).resolve().parent
SPLITS = ("train", "test")
DATA_SOURCE = "gsm8k"
INSTRUCTION = (
    "Think step by step, then end with the final number on a line of its own, written as: #### <number>"
)
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ground_truth", pa.string()),
        ("answer", pa.string()),
        ("data_source", pa.string()),
        ("split", pa.string()),
    ]
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # as in "48/2 = <<48/2=24>>24"


def convert_row(question: str, answer: str, split: str) -> dict[str, Any]:
    """Converts a question and its answer to a row of the parquet file.

    Raises:
        ValueError: the answer does not end in `#### <number>`.
    """
    return {
        "prompt": [{"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"}],
        "ground_truth": extract_answer(answer),
        "answer": _CALCULATION.sub("", answer),
        "data_source": DATA_SOURCE,
        "split": split,
    }


def read_rows(path: Path, split: str) -> Iterator[dict[str, Any]]:
    """Reads and converts one of GSM8K's files.

    Raises:
        DataError: the file is missing or empty, or the line that it names does not have GSM8K's form.
    """
    if not path.is_file():
        raise DataError(
            f"there is no file {path}: download GSM8K's {path.name} and give its folder with --input"
        )
    number = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                yield convert_row(record["question"], record["answer"], split)
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{path}, line {number}: {error}; each line must be a JSON object with the strings "
                    "question and answer, and the answer must end in '#### <number>'"
                ) from error
    if number == 0:
        raise DataError(f"{path} is empty")


def convert(source: Path, target: Path) -> dict[str, int]:
    """Writes `train.parquet` and `test.parquet` to `target`; returns the number of rows of each.

    Raises:
        DataError: a file of `source` is missing or malformed.
    """
    tables = {
        split: pa.Table.from_pylist(list(read_rows(source / f"{split}.jsonl", split)), schema=SCHEMA)
        for split in SPLITS
    }
    target.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        pq.write_table(table, target / f"{split}.parquet")
    return {split: table.num_rows for split, table in tables.items()}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--input", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl"
    )
    parser.add_argument("--output", type=Path, default=HERE / "data", help="folder for the parquet files")
    options = parser.parse_args(arguments)
    try:
        counts = convert(options.input, options.output)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for split, num_rows in counts.items():
        print(f"{options.output / f'{split}.parquet'}: {num_rows} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
