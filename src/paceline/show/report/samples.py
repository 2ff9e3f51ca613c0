"""The samples that a run has saved: which files there are, their rows, and one row token by token."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.show.report.token_texts import TokenTexts

_NAME = re.compile(r"(step|val)_(\d+)")
_SHORT = 600
_MAX_ROWS = 4096
_TOKEN_COLUMNS = {"engine": "response_log_probs", "learner": "learner_log_probs"}
_FACTS = (
    "prompt_id", "sample_index", "reward", "num_response_tokens", "finish_reason", "stop_reason",
    "num_turns", "num_tool_calls", "policy_version", "server",
)  # fmt: skip
_TEXTS = {"prompt": "prompt", "response": "response", "truth": "ground_truth"}

Row = Mapping[str, Any]


class SampleFiles:
    """The parquet files of a run; where pyarrow is not installed there are none."""

    def __init__(self, folder: Path, texts: TokenTexts) -> None:
        self._folder, self._texts = folder, texts

    def names(self) -> list[str]:
        """Returns the files' names, such as step_000012, by step, training before validation."""
        matches = [_NAME.fullmatch(path.stem) for path in self._folder.glob("*.parquet")]
        return [m[0] for m in sorted(filter(None, matches), key=lambda m: (int(m[2]), m[1]))]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the rows of a file, with their texts shortened; [] if there is no such file."""
        rows = self._read(name, without_tokens=True)[:_MAX_ROWS]
        groups = _groups(rows)
        return [
            {
                "row": number,
                "group": groups.get(row.get("prompt_id")),
                **_facts(row),
                **{key: _shorten(row.get(column)) for key, column in _TEXTS.items()},
            }
            for number, row in enumerate(rows)
        ]

    def details(self, name: str, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
        """Returns rows with their full texts and, if they were saved, tokens and log-probs."""
        rows = self._read(name) if numbers else []
        return {number: self._detail(rows[number]) for number in numbers if 0 <= number < len(rows)}

    def _detail(self, row: Row) -> dict[str, Any]:
        detail = {key: str(row.get(column) or "") for key, column in _TEXTS.items()}
        ids = row.get("response_token_ids")
        if not ids:
            return detail
        scores = {key: row[column] for key, column in _TOKEN_COLUMNS.items() if row.get(column) is not None}
        return {
            **detail,
            "tokens": self._texts.of(ids),
            "mask": list(row.get("response_mask") or [1] * len(ids)),
            "segments": list(row.get("segment_starts") or ()),
            **{key: _rounded(s) for key, s in scores.items()},
        }

    def _read(self, name: str, *, without_tokens: bool = False) -> list[dict[str, Any]]:
        path = self._folder / f"{name}.parquet"
        if _NAME.fullmatch(name) is None or not path.is_file():
            return []
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            return []
        try:
            file = pyarrow.parquet.ParquetFile(path)
            names = [n for n in file.schema_arrow.names if not (without_tokens and _is_of_tokens(n))]
            rows: list[dict[str, Any]] = file.read(columns=names).to_pylist()
        except (OSError, pyarrow.ArrowException):
            return []  # it is being replaced, or damaged
        return rows


def _groups(rows: Sequence[Row]) -> dict[object, dict[str, float]]:
    """Returns the count, least, mean and greatest reward of each prompt's scored samples."""
    rewards = defaultdict[object, list[float]](list)
    for row in rows:
        if isinstance(row.get("reward"), float):
            rewards[row.get("prompt_id")].append(row["reward"])
    return {
        prompt: {"count": len(of), "low": min(of), "mean": round(fmean(of), 6), "high": max(of)}
        for prompt, of in rewards.items()
    }


def _is_of_tokens(column: str) -> bool:
    return column.endswith(("_token_ids", "_log_probs", "_mask"))


def _facts(row: Row) -> dict[str, Any]:
    return {**{name: row.get(name) for name in _FACTS}, "components": _components(row.get("components"))}


def _components(text: object) -> dict[str, float]:
    try:
        parts = json.loads(str(text)) if text else {}
    except ValueError:
        return {}
    return parts if isinstance(parts, dict) else {}


def _shorten(text: object) -> str:
    words = str(text if text is not None else "")
    return words if len(words) <= _SHORT else f"{words[:_SHORT]}…"


def _rounded(scores: Sequence[float]) -> list[float]:
    return [round(float(score), 4) for score in scores]
