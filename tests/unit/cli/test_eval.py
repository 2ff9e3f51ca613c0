"""`paceline eval`: what the servers are asked, and which answers belong to which set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from paceline.cli.commands.start import eval as command
from paceline.cli.main import main
from paceline.config.run import RunConfig
from paceline.sizing.placement import Settled

ASKED: list[RunConfig] = []
RIGHT, PROMPT = 1, "p"
OF_RUN = {
    "data": {
        "train_files": ["t.jsonl"],
        "val_files": ["easy.jsonl"],
        "val_max_prompts": 1,
        "val_sets": {
            "hard": {
                "files": ["hard.jsonl"],
                "n": 4,
                "top_p": 0.9,
                "right_above": 1,
                "max_prompts": 1,
                "every": 3,
                "reward": {"functions": [{"name": "own.py:f"}]},
            }
        },
        "prompt_key": "prompt",
    },
    "model": {"path": "start", "dtype": "bfloat16", "lora": {"rank": 4}},
    "rollout": {"val": {"n": 2, "temperature": 1.0}},
    "reward": {"functions": [{"name": "math_verify"}]},
    "actor": {"use_kl_loss": True},
    "algorithm": {"adv_estimator": "gae"},
    "trainer": {"total_steps": 9},
}


def answered(config: RunConfig, **_: Any) -> int:
    """Writes the answers to each prompt, as a run does after it has validated: the first RIGHT are right."""
    ASKED.append(config)
    sets = config.held_out_sets
    files = [Path(file) for held_out in sets for file in held_out.files]
    number = sum(len(file.read_text().splitlines()) for file in files)
    rows = [
        {
            "prompt_id": prompt,
            "prompt": f"{PROMPT}{prompt}",
            "response": str(prompt),
            "reward": float(sample < RIGHT) if prompt != 1 else None,
            "num_sampled_tokens": 3,
            "finish_reason": "length" if prompt == 0 else "stop",
        }
        for prompt in range(number)
        for sample in range(sets[0].n)
    ]
    folder = Path(str(config.trainer.run_dir)) / "trajectories"
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "val_000000.parquet")
    print("what a run says while it runs")
    return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ASKED.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train", answered)
    monkeypatch.setattr(command, "quick_check", lambda config: None)
    monkeypatch.setattr(command, "notes", lambda config: [])
    monkeypatch.setattr(command, "settle", lambda config, machine: Settled(config=config, remarks=[]))
    for name, sources in (("easy", "aab"), ("hard", "cc")):
        lines = [json.dumps({"prompt": "p", "ground_truth": "1", "data_source": kind}) for kind in sources]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "easy=easy.jsonl", "--data", "hard=hard.jsonl", "--reward", "gsm8k", "--json"]
    sampling = ["--n", "2", "--temperature", "0.7", "data.max_response_length=20000"]
    assert main(["eval", "my/model", *words, *sampling]) == 0
    out, err = capsys.readouterr()
    assert "what a run says" in err
    results = json.loads(out)
    assert list(results) == ["easy", "easy/a", "easy/b", "hard"]
    assert [results[name]["num_prompts"] for name in results] == [2, 1, 1, 2]
    assert [results[name]["num_missing"] for name in results] == [1, 1, 0, 0]
    assert results["easy"]["right"]["value"] == 0.5
    assert results["easy"]["pass_at"]["2"]["value"] == 1.0
    assert (results["easy"]["cut"]["value"], results["hard"]["cut"]["value"]) == (0.5, 0.0)
    assert json.loads((folder / "runs/evaluations/model/evaluation.json").read_text()) == results
    (config,) = ASKED
    assert (config.trainer.total_steps, config.trainer.val_before_train) == (0, True)
    assert [(s.name, s.n, s.temperature) for s in config.held_out_sets] == [
        ("easy", 2, 0.7),
        ("hard", 2, 0.7),
    ]
    assert (config.model.path, config.data.max_response_length) == ("my/model", 20000)


def test_the_gain_since_an_earlier_evaluation(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--data", "easy=easy.jsonl", "--reward", "gsm8k", "--n", "4", "--temperature", "1"]
    assert main(["eval", "my/model", *words, "--out", "then"]) == 0
    assert "gain" not in capsys.readouterr().out
    monkeypatch.setattr(sys.modules[__name__], "RIGHT", 3)
    assert main(["eval", "my/model", *words, "--out", "now", "--against", "then"]) == 0
    assert "+0.500 [+0.500, +0.500]" in capsys.readouterr().out
    results = json.loads((folder / "now/evaluation.json").read_text())
    assert {name: result["gain"]["value"] for name, result in results.items()} == {
        "easy": 0.5,
        "easy/a": 0.5,
        "easy/b": 0.5,
    }
    assert main(["eval", "my/model", *words, "--out", "late", "--against", "nowhere"]) == 2
    assert "nowhere is no folder of an evaluation" in capsys.readouterr().err
    assert len(ASKED) == 2, "refused before anything is answered"
    monkeypatch.setattr(sys.modules[__name__], "PROMPT", "q")
    assert main(["eval", "my/model", *words, "--out", "others", "--against", "then"]) == 2
    out, err = capsys.readouterr()
    assert "no gain since then, which answered other prompts" in err
    assert "easy" in out
    assert "gain" not in out
    assert (folder / "others/evaluation.json").is_file(), "an hour's answers are not lost"


def test_a_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {
        "data": {
            "train_files": "t.jsonl",
            "val_files": "easy.jsonl",
            "val_max_prompts": 1,
            "extra_keys": ["e"],
        },
        "model": {"path": "start"},
        "actor": {"use_kl_loss": True},
        "algorithm": {"adv_estimator": "rloo"},
        "rollout": {"val": {"n": 2, "temperature": 1.0}},
        "reward": {"functions": [{"name": "gsm8k", "kwargs": {"method": "flexible"}}]},
        "trainer": {"total_steps": 9},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "mine.yaml").write_text("extends: base.yaml\nmodel: {dtype: bfloat16}\n")
    assert main(["eval", "mine.yaml"]) == 0
    (config,) = ASKED
    assert (config.model.path, config.model.dtype, config.actor.use_kl_loss) == ("start", "bfloat16", False)
    assert [(f.name, f.kwargs) for f in config.reward.functions] == [("gsm8k", {"method": "flexible"})]
    assert [(s.files, s.n, s.max_prompts) for s in config.held_out_sets] == [(("easy.jsonl",), 2, None)]
    assert (config.trainer.total_steps, config.data.extra_keys) == (0, ("e",))
    assert config.algorithm.adv_estimator != "rloo", "what only training needs is left out"
    assert (folder / "runs/evaluations/mine/evaluation.json").is_file()
    assert "val" in capsys.readouterr().out
    assert main(["eval", "mine.yaml", "--data", "hard=hard.jsonl", "--out", "other", "model.path=o"]) == 0
    assert ([s.name for s in ASKED[-1].held_out_sets], ASKED[-1].model.path) == (["hard"], "o")
    assert main(["eval", "mine.yaml", "trainer.total_steps=3"]) == 2
    assert "an evaluation trains nothing" in capsys.readouterr().err
    assert main(["eval", "none.yaml"]) == 2
    assert "cannot read configuration none.yaml" in capsys.readouterr().err


@pytest.fixture
def exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int, str]]:
    """The run `mine`, and the checkpoints of it that are exported."""
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.resolved.yaml").write_text(yaml.safe_dump(OF_RUN))
    exported: list[tuple[Path, int, str]] = []

    def export(run_folder: Path, step: int, out: Path, *, says_so: bool) -> int:
        assert not says_so, "standard output is for the results"
        exported.append((run_folder, step, out.name))
        return 0

    monkeypatch.setattr(command, "chosen_step", lambda run_folder, step: int(step))
    monkeypatch.setattr(command, "export_step", export)
    return exported


def test_a_run_at_a_step(
    folder: Path, exported: list[tuple[Path, int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "mine@7"]) == 0
    assert exported == [(folder / "runs" / "mine", 7, "mine-7.step_7")]
    (config,) = ASKED
    assert config.model.path.endswith("mine-7.step_7")
    assert (config.model.lora, config.model.dtype, config.actor.use_kl_loss) == (None, "bfloat16", False)
    assert [f.name for f in config.reward.functions] == ["math_verify"]
    assert [f.name for f in config.rewards["hard"].functions] == ["own.py:f"]
    easy, hard = config.held_out_sets
    assert (easy.files, easy.n, easy.max_prompts) == (("easy.jsonl",), 2, None)
    assert (hard.files, hard.n, hard.top_p, hard.max_prompts) == (("hard.jsonl",), 4, 0.9, None)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        *("val", "val/a", "val/b", "hard")
    ]
    results = json.loads((folder / "runs/evaluations/mine-7/evaluation.json").read_text())
    assert (results["val"]["right"]["value"], results["hard"]["right"]["value"]) == (0.5, 0.0)


@pytest.mark.usefixtures("exported")
def test_options_hold_for_all_sets_of_a_run() -> None:
    again = ["--n", "3", "--temperature", "0.5", "--right-above", "0.2", "--out", "again"]
    assert main(["eval", "mine@7", *again]) == 0
    values = [(s.n, s.temperature, s.right_above, s.top_p) for s in ASKED[-1].held_out_sets]
    assert values == [(3, 0.5, 0.2, 1.0), (3, 0.5, 0.2, 0.9)]
    assert main(["eval", "mine@7", "--out", "third", "data.val_sets.hard.reward=other.py:g"]) == 0
    assert [f.name for f in ASKED[-1].rewards["hard"].functions] == ["other.py:g"]
    assert main(["eval", "mine@7", "--out", "fourth", "--reward", "gsm8k"]) == 0
    assert list(ASKED[-1].rewards) == [""], "--reward holds for all sets"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--reward", "gsm8k"], "name the held-out prompts"),
        (["m", "--data", "easy.jsonl"], "must look like NAME=FILE"),
        (["m", "--data", "a=easy.jsonl", "--data", "a=hard.jsonl"], "names a twice"),
        (["m", "--data", "a=easy.jsonl"], "name the reward function that scores"),
        (["m", "--data", "a=easy.jsonl", "--reward", "gsm8k", "--n", "4"], "add --temperature 1"),
    ],
)
def test_what_is_missing_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err
    assert sys.modules["paceline.cli.commands.start.eval"] is command
