"""`paceline init`: the file that it writes runs as it is, and asks for what it cannot know."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from paceline.cli.commands.prepare import init
from paceline.cli.main import main
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.data.prompts import encode_prompt, load_tokenizer
from support.byte_tokenizer import save_tokenizer


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo"])
def test_it_writes_a_configuration_that_loads(project: Path, algorithm: str) -> None:
    words = ["--model", "model", "--data", "train.parquet", "--algorithm", algorithm, "--steps", "7"]
    assert main(["init", "my run.yaml", *words]) == 0
    config = load(RunConfig, "my run.yaml")
    assert ("critic" in config.needs) is (algorithm == "ppo")
    assert config.algorithm.dynamic_sampling.enable is (algorithm == "dapo")
    assert (config.trainer.name, config.trainer.total_steps) == ("my-run", 7)
    assert (config.data.prompt_key, config.data.ground_truth_key) == ("prompt", "ground_truth")
    assert config.data.prompt_format == "auto"
    assert config.actor.optim.warmup_steps_ratio == 0.05
    text = (project / "my run.yaml").read_text()
    assert "# samples per prompt" in text
    assert max(map(len, text.splitlines())) < 120


def test_columns_and_the_chat_template_are_looked_for(project: Path) -> None:
    row = {"question": "1 + 1?", "reward_model": {"ground_truth": "2"}}
    (project / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (project / "model" / "chat_template.jinja").write_text("x")
    assert main(["init", "a.yaml", "--model", "model", "--data", "rows.jsonl", "--reward", "gsm8k"]) == 0
    config = load(RunConfig, "a.yaml")
    assert (config.data.prompt_key, config.data.ground_truth_key) == ("question", "reward_model.ground_truth")
    assert config.data.prompt_format == "chat"
    assert config.reward.functions[0].name == "gsm8k"
    assert config.reward.functions[0].kwargs == {"method": "flexible"}


@pytest.mark.parametrize(
    ("positions", "lengths"), [(64, (21, 43)), (1535, (511, 1024)), (1536, (512, 1024)), (None, (512, 1024))]
)
def test_prompt_and_response_fit_the_model(
    project: Path, positions: int | None, lengths: tuple[int, int]
) -> None:
    (project / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    assert main(["init", "a.yaml", "--model", "model", "--data", "train.parquet"]) == 0
    data = load(RunConfig, "a.yaml").data
    assert (data.max_prompt_length, data.max_response_length) == lengths
    assert "\n  train_batch_size: 64         # prompts per step\n" in (project / "a.yaml").read_text()


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (63, 63), (64, 64), (65, 64)])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_batch_has_no_more_prompts_than_the_data(project: Path, suffix: str, rows: int, batch: int) -> None:
    """With more, the first `paceline check` of a small file would end with a fault."""
    data = [{"prompt": f"{i} + 1 =", "ground_truth": str(i + 1)} for i in range(rows)]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), project / "rows.parquet")
    else:  # blank lines are no rows
        (project / "rows.jsonl").write_text("\n\n".join(map(json.dumps, data)) + "\n\n")
    assert main(["init", "a.yaml", "--model", "model", "--data", f"rows.{suffix}"]) == 0
    config = load(RunConfig, "a.yaml")
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (batch, batch)


def test_a_model_that_is_not_here_yet_is_noted(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["init", "a.yaml", "--model", "Qwen/Qwen3-0.6B", "--data", "train.parquet"]) == 0
    assert "Qwen/Qwen3-0.6B is not a folder here, so it is fetched from the" in capsys.readouterr().out
    assert main(["init", "c.yaml", "--model", "not/here/yet", "--data", "train.parquet"]) == 0
    assert "there is no folder not/here/yet" in capsys.readouterr().out
    assert main(["init", "b.yaml", "--model", "model", "--data", "train.parquet"]) == 0
    assert "note" not in capsys.readouterr().out


def test_on_a_terminal_it_asks(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    answers = {"Model (a folder, or a name on the hub)": "model", "Training steps": "3"}

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return answers.get(prompt.partition(" [")[0].removesuffix(": "), "")

    monkeypatch.setattr(init.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "a.yaml", "--data", "train.parquet", "--reward", "exact_match"]) == 0
    assert load(RunConfig, "a.yaml").trainer.total_steps == 3
    assert "Column with the prompt [prompt]: " in asked
    assert len(asked) == 5


def test_a_wrong_answer_is_asked_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["", "model", "gone.parquet", "train.parquet", "", "", "", "ppp", "ppo", "many", "0", "5"])
    monkeypatch.setattr(init.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    assert main(["init", "a.yaml"]) == 0
    config = load(RunConfig, "a.yaml")
    assert (config.trainer.total_steps, "critic" in config.needs) == (5, True)
    assert [line.partition("; Ctrl-D ends this")[0] for line in capsys.readouterr().out.splitlines()[:5]] == [
        "an answer is needed",
        "data file gone.parquet does not exist",
        "'ppp' is none of grpo, dapo, ppo",
        "'many' is not a whole number from 1",
        "'0' is not a whole number from 1",
    ]


def test_ctrl_d_ends_the_questions(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(prompt: str) -> str:
        if prompt.startswith("Training steps"):
            raise EOFError
        return ""

    monkeypatch.setattr(init.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "a.yaml", "--model", "model", "--data", "train.parquet"]) == 2
    assert (
        "no answer to 'Training steps', so nothing was written; begin again, or give --steps"
        in capsys.readouterr().err
    )
    assert not (project / "a.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.yaml"], "run.yaml exists"),
        (["a.yaml"], "model (a folder, or a name on the hub) is missing: give --model"),
        (["a.yaml", "--model", "model", "--data", "gone.jsonl"], "gone.jsonl does not exist; correct --data"),
        (["a.yaml", "--model", "model", "--data", "odd.jsonl"], "is missing: give --prompt-key, one of text"),
        (["a.yaml", "--model", "model", "--data", "a.csv"], "a.csv: cannot tell the format from '.csv'"),
        (
            ["a.yaml", "--model", "model", "--data", "train.parquet", "--steps", "0"],
            "0' is not a whole number from 1; correct --steps",
        ),
    ],
)
def test_what_it_cannot_know_it_says(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (project / "odd.jsonl").write_text('{"text": "x"}\n')
    (project / "a.csv").write_text("question,answer\n")
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (project / "a.yaml").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "bad.jsonl"], "bad.jsonl, line 2, is not JSON"),
        (["--data", "list.jsonl"], "list.jsonl, line 1, holds a list; every line must be an object"),
        (["--data", "train.parquet", "--reward", "gsm8kk"], "'gsm8kk' is none of exact_match, gsm8k,"),
        (
            ["--data", "train.parquet", "--reward", "mine.py"],
            "nor path/to/file.py:function; correct --reward",
        ),
        (["--data", "gone.jsonl"], "data file gone.jsonl does not exist; correct --data"),
    ],
)
def test_what_cannot_be_used_is_said_and_nothing_written(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    (project / "bad.jsonl").write_text("\n{oops\n")
    (project / "list.jsonl").write_text("[1]\n")
    assert main(["init", "a.yaml", "--model", "model", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (project / "a.yaml").exists()


def test_lengths_come_from_the_data(project: Path) -> None:
    """The longest of 40 prompts has 9 characters, and so with the drawn tokenizer's begin 9 or 10 tokens."""
    save_tokenizer(project / "model")
    (project / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    rows = [{"prompt": "1 + 1 = ?"[: 4 + number % 6], "ground_truth": "2"} for number in range(40)]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["init", "a.yaml", "--model", "model", "--data", "rows.jsonl"]) == 0
    longest = max(len(encode_prompt(load_tokenizer("model"), row["prompt"], "auto")) for row in rows)
    data = load(RunConfig, "a.yaml").data
    assert longest < data.max_prompt_length == 8 * -(-9 * longest // 64) <= 16
    assert data.max_response_length == 256 - data.max_prompt_length
    assert (
        f"# tokens; longer prompts are left out; the longest of the first 40 has {longest}\n"
        in (project / "a.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "words", "policy", "critic"),
    [
        (2, 48, [], 7e-5, 5e-4),
        (24, 896, [], 1e-6, 1e-5),  # 494 M
        (6, 896, [], 1e-5, 1e-4),
        (24, 896, ["--lora", "16"], 1e-5, 1e-5),
        (2, 48, ["--lora", "8"], 7e-4, 5e-4),
    ],
)
def test_rates_go_by_the_models_size(
    project: Path, layers: int, hidden: int, words: list[str], policy: float, critic: float
) -> None:
    tree = json.loads((project / "model" / "config.json").read_text())
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 5 * hidden}
    vocab = {"vocab_size": 151_936 if hidden > 48 else 100, "tie_word_embeddings": True}
    (project / "model" / "config.json").write_text(json.dumps(tree | sizes | vocab))
    command = ["init", "a.yaml", "--model", "model", "--data", "train.parquet", "--algorithm", "ppo", *words]
    assert main(command) == 0
    config = load(RunConfig, "a.yaml")
    assert (config.actor.optim.lr, config.critic.optim.lr) == (policy, critic)
    rank = config.model.lora.rank if config.model.lora else 0
    assert rank == int(words[1] if words else 0)


@pytest.mark.parametrize(("steps", "every"), [(200, (10, 50)), (8, (1, 2)), (1, (1, 1)), (1000, (50, 250))])
def test_validation_and_checkpoints_go_by_the_steps(
    project: Path, steps: int, every: tuple[int, int]
) -> None:
    words = ["--model", "model", "--data", "train.parquet", "--steps", str(steps)]
    assert main(["init", "a.yaml", *words]) == 0
    trainer = load(RunConfig, "a.yaml").trainer
    assert (trainer.test_freq, trainer.save_freq) == every


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [],
            "'prompt' holds 7, and a prompt is a string or a list of messages with role and content; give ",
        ),
        (
            ["--prompt-key", "text"],
            "the first row has no 'text'; it has prompt, words, ground_truth; correct",
        ),
        (
            ["--prompt-key", "words", "--ground-truth-key", "truth"],
            "has no 'truth'; it has prompt, words, gro",
        ),
        (["--prompt-key", "words", "--reward", "gone.py:f"], "gone.py"),
        (["--prompt-key", "words", "--reward", "mine.py:g"], "'g'"),
    ],
)
def test_a_row_or_reward_that_no_run_could_use_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    (project / "rows.jsonl").write_text('{"prompt": 7, "words": "1 + 1", "ground_truth": "2"}\n')
    (project / "mine.py").write_text("def f(response, ground_truth, **extra):\n    return 1.0\n")
    assert main(["init", "a.yaml", "--model", "model", "--data", "rows.jsonl", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (project / "a.yaml").exists()


@pytest.mark.parametrize(
    ("positions", "longest", "lengths"),
    [
        (1000, 64, (72, 928)),
        (100, 60, (60, 40)),
        (100, 30, (40, 60)),
        (None, 64, (72, 1024)),
        (80, 79, (79, 1)),
    ],
)
def test_prompts_may_be_an_eighth_longer_than_those_looked_at(
    positions: int | None, longest: int, lengths: tuple[int, int]
) -> None:
    assert init._lengths({"max_position_embeddings": positions}, longest) == lengths
