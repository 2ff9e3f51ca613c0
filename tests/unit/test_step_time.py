"""The estimate of a step, held against steps that were timed on GPUs, and what it must say of a change."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config.load import load, parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS, card_of, read_gpus
from paceline.core.errors import ConfigError
from paceline.models.model_shape import ModelShape
from paceline.show.live.expecting_view import ExpectingView
from paceline.show.live.view import Metrics
from paceline.sizing.expectation import Expectation
from paceline.sizing.layouts import Layout, choose_layout, layouts
from paceline.sizing.machine import Machine
from paceline.sizing.step_time import StepTime


def qwen(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "1.5B": qwen(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "3B": qwen(2048, 11_008, 36, 16, 2, 151_936, tied=True),
    "7B": qwen(3584, 18_944, 28, 28, 4, 152_064, tied=False),
    "32B": qwen(5120, 27_648, 64, 40, 8, 152_064, tied=False),
}
KEPT = {"recompute": "none", "keep_gathered": True, "accumulate": True, "offload": False}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A run of docs/measurements-gpu.md: its settings, and the seconds of generation, update and step."""

    shape: str
    card: str
    gpus: int
    prompts: int
    seconds: tuple[float, float, float]
    prompt: int = 512
    response: int = 1024
    mean: tuple[int, int] | None = None
    num_seqs: int = 128
    micro_batch: int = 8704
    sleep: str = "never"
    memory: dict[str, Any] | None = None
    compiled: bool = True
    split: bool = False
    eager: bool = False
    lora: dict[str, Any] | None = None
    samples: int = 8
    estimator: str = "grpo"

    @property
    def config(self) -> RunConfig:
        ranks = self.gpus // 2 if self.split else self.gpus
        devices = list(range(ranks))
        model: dict[str, Any] = {"path": "model", "dtype": "bfloat16"}
        return parse(
            RunConfig,
            {
                "data": {
                    "train_files": ["x.parquet"],
                    "max_prompt_length": self.prompt,
                    "max_response_length": self.response,
                    "train_batch_size": self.prompts,
                },
                "model": model if self.lora is None else model | {"lora": self.lora},
                "algorithm": {"adv_estimator": self.estimator},
                "actor": {
                    "ppo_mini_batch_size": self.prompts // 2,
                    "ppo_max_token_len_per_gpu": self.micro_batch,
                    "compile": self.compiled,
                    "memory": KEPT if self.memory is None else self.memory,
                },
                "learner": {"world_size": ranks, "devices": devices},
                "rollout": {
                    "n": self.samples,
                    "replicas": ranks,
                    "max_num_seqs": self.num_seqs,
                    "sleep": self.sleep,
                    "enforce_eager": self.eager,
                    "devices": [gpu + ranks for gpu in devices] if self.split else devices,
                },
                "reward": {"functions": [{"name": "exact_match"}]},
                "trainer": {"total_steps": 1},
            },
        )

    @property
    def estimate(self) -> StepTime:
        shape = ModelShape.of(SHAPES[self.shape])
        assert shape is not None
        prompt, response = self.mean or (None, None)
        card = CARDS[self.card]
        return StepTime.of(self.config, shape, card, prompt_tokens=prompt, response_tokens=response)


ON_HOST = {"keep_gathered": False, "accumulate": False, "offload": True}
OFFLOADED = {"recompute": "full", "keep_gathered": False, "accumulate": False, "offload": True}
TIMED = {
    "1.5B in turns": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        num_seqs=256,
        micro_batch=17_408,
        seconds=(8.7, 6.3, 16.5),
    ),
    "1.5B, another H100": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        num_seqs=256,
        micro_batch=17_408,
        seconds=(6.9, 6.0, 14.5),
    ),
    "3B": Timed(shape="3B", card="H100", gpus=2, prompts=32, seconds=(6.7, 6.1, 14.4)),
    "1.5B, PPO with a critic": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        samples=4,
        estimator="gae",
        micro_batch=9216,
        sleep="always",
        seconds=(5.53, 6.16, 14.48),
    ),
    "1.5B with adapters": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        num_seqs=256,
        micro_batch=16_384,
        compiled=False,
        lora={"rank": 32},
        seconds=(7.75, 7.73, 17.51),
    ),
    "3B with FlashAttention 4": Timed(
        shape="3B", card="H100", gpus=2, prompts=32, sleep="always", seconds=(6.34, 5.55, 13.72)
    ),
    "7B, two H100s, a quarter kept": Timed(
        shape="7B",
        card="H100",
        gpus=2,
        prompts=32,
        micro_batch=16_384,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.25, "keep_gathered": True},
        seconds=(9.72, 14.97, 27.01),
    ),
    "7B, two H100s, most kept": Timed(
        shape="7B",
        card="H100",
        gpus=2,
        prompts=32,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.9},
        seconds=(9.25, 14.08, 25.97),
    ),
    "7B, four H100s": Timed(
        shape="7B",
        card="H100",
        gpus=4,
        prompts=64,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.9},
        seconds=(9.23, 13.55, 25.79),
    ),
    "7B, four GPUs": Timed(shape="7B", card="H200", gpus=4, prompts=64, seconds=(7.51, 10.58, 20.42)),
    "7B, mixed lengths": Timed(
        shape="7B",
        card="H200",
        gpus=4,
        prompts=64,
        mean=(320, 456),
        micro_batch=12_288,
        sleep="always",
        memory=KEPT | {"recompute": 0.9},
        seconds=(5.85, 5.01, 12.71),
    ),
    "7B, two GPUs": Timed(
        shape="7B",
        card="H200",
        gpus=2,
        prompts=32,
        sleep="always",
        memory=KEPT | {"recompute": 0.9},
        seconds=(7.64, 11.58, 21.82),
    ),
    "3B, divided, mixed lengths": Timed(
        shape="3B",
        card="H200",
        gpus=2,
        prompts=32,
        response=2048,
        mean=(320, 830),
        num_seqs=64,
        micro_batch=16_384,
        split=True,
        seconds=(20.7, 9.2, 32.0),
    ),
    "32B, averages on the host": Timed(
        shape="32B",
        card="H200",
        gpus=4,
        prompts=8,
        prompt=256,
        response=256,
        num_seqs=64,
        micro_batch=8192,
        sleep="always",
        compiled=False,
        memory=OFFLOADED,
        seconds=(4.9, 8.2, 14.8),
    ),
    "32B with adapters": Timed(
        shape="32B",
        card="H200",
        gpus=1,
        prompts=8,
        prompt=256,
        response=256,
        num_seqs=64,
        micro_batch=8192,
        sleep="always",
        compiled=False,
        eager=True,
        memory=KEPT | {"recompute": "full"},
        lora={"rank": 32, "alpha": 64, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        seconds=(8.5, 7.1, 17.5),
    ),
}


@pytest.mark.parametrize("name", TIMED)
def test_timed_steps_are_estimated_to_a_fifth(name: str) -> None:
    timed = TIMED[name]
    estimate = timed.estimate
    phases = (estimate.generation, estimate.update, estimate.seconds)
    assert phases == pytest.approx(timed.seconds, rel=0.2)
    rows = timed.prompts * timed.samples
    prompt, response = timed.mean or (timed.prompt, timed.response)
    assert estimate.num_tokens == rows * (prompt + response)
    assert estimate.num_gpus == timed.gpus
    assert estimate.tokens_per_s == pytest.approx(estimate.num_tokens / estimate.seconds / timed.gpus)


def test_two_updates_of_one_run_are_told_apart() -> None:
    """Measured one beside the other: 14.08 s, and 14.97 s for the one that had been chosen."""
    most, quarter = TIMED["7B, two H100s, most kept"], TIMED["7B, two H100s, a quarter kept"]
    assert most.estimate.update < quarter.estimate.update


def changed(timed: Timed, **sections: dict[str, Any]) -> StepTime:
    tree = timed.config.model_dump(mode="json", exclude_unset=True)
    for name, section in sections.items():
        tree[name] = tree[name] | section
    shape = ModelShape.of(SHAPES[timed.shape])
    assert shape is not None
    return StepTime.of(parse(RunConfig, tree), shape, CARDS[timed.card])


def test_what_a_setting_costs() -> None:
    timed = TIMED["3B"]
    base = changed(timed)
    # Nothing is shared: each of eight samples has its own 512 tokens of prompt.
    alone = changed(timed, actor={"shared_prompts": "off"})
    assert alone.update / base.update == pytest.approx(1536 / 1088, rel=0.1)
    assert alone.generation == base.generation
    for recompute, more in (("full", 1.28), (0.25, 1.1), (0.9, 1.012)):
        slower = changed(timed, actor={"memory": KEPT | {"recompute": recompute}})
        assert slower.update / base.update == pytest.approx(more, rel=0.01)
    twice = changed(timed, actor={"ppo_epochs": 2})
    assert twice.update == pytest.approx(2 * base.update)
    # Averages visit the GPU in both optimizer steps: 1.54 billion per rank, 16 bytes each.
    visited = changed(timed, actor={"memory": KEPT | {"offload": True}})
    assert visited.update - base.update == pytest.approx(2 * 1.543e9 * 16 / 65e9, rel=0.01)
    critic = changed(timed, algorithm={"adv_estimator": "gae"})
    assert critic.update == pytest.approx(2 * base.update)
    # All rows are scored and have values, where half of them were scored.
    assert critic.scoring == pytest.approx(4 * base.scoring)
    reference = changed(timed, actor={"use_kl_loss": True})
    assert reference.scoring == pytest.approx(4 * base.scoring)
    rounds = changed(timed, rollout={"max_num_seqs": 64})
    assert 1.3 < rounds.generation / base.generation < 2.0
    one_engine = changed(timed, rollout={"replicas": 1, "tensor_model_parallel_size": 2})
    assert one_engine.generation != base.generation
    assert changed(timed, rollout={"enforce_eager": True}).generation > 2 * base.generation
    assert changed(timed, rollout={"sleep": "always"}).weights > base.weights + 0.25
    slow = changed(timed, model={"dtype": "float32"})
    assert slow.update > 1.8 * base.update
    short = TIMED["3B"]
    half = StepTime.of(short.config, ModelShape.of(SHAPES["3B"]), CARDS["H100"], response_tokens=512)  # type: ignore[arg-type]
    # The longest answer may still be as long as before, so that generation lasts nearly as long.
    assert half.update < 0.6 * base.update
    assert 0.75 * base.generation < half.generation < base.generation


def test_experts_that_no_token_meets_cost_no_arithmetic() -> None:
    tree = SHAPES["3B"] | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "tie_word_embeddings": False,
    }
    shape = ModelShape.of(tree)
    assert shape is not None
    assert shape.num_parameters / 1e9 == pytest.approx(30.5, abs=0.1)
    assert (shape.active_parameters + shape.vocab * shape.hidden) / 1e9 == pytest.approx(3.35, abs=0.05)
    assert (
        shape.active_parameters + shape.idle_parameters
        == shape.num_parameters - shape.vocab * shape.hidden - shape.hidden
    )


def test_few_sequences_read_few_experts() -> None:
    """One alone reads 8 of 128 experts a step; 128 at once nearly all."""
    tree = SHAPES["3B"] | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    shape = ModelShape.of(tree)
    assert shape is not None
    tree = TIMED["3B"].config.model_dump(mode="json", exclude_unset=True)
    tree["data"]["train_batch_size"] = tree["actor"]["ppo_mini_batch_size"] = 2
    tree["rollout"]["n"] = 1
    alone = StepTime.of(
        parse(RunConfig, tree | {"algorithm": {"adv_estimator": "remax"}}), shape, CARDS["H100"]
    )
    read = 2 * (shape.active_parameters + 8 / 128 * shape.idle_parameters)
    assert alone.generation == pytest.approx(1024 * (read / (0.95 * 3.35e12) + 1.9e-3), rel=0.03)


def test_what_fits_comes_first_and_heads_divide_an_engine(project: Path) -> None:
    def of(name: str, gpus: str) -> list[Layout]:
        config = load(RunConfig, project / "run.yaml", [f"model.path={name}", "model.dtype=bfloat16"])
        return layouts(config, Machine.imagined(*read_gpus(gpus)))

    refused = [bool(layout.refusal) for layout in of("32B", "8xH100")]
    assert True in refused
    assert False in refused
    assert refused == sorted(refused)
    small = of("1.5B", "8xH100")  # twelve heads
    sizes = {layout.settled.rollout.tensor_model_parallel_size for layout in small}
    assert sizes == {1, 2, 4}


def test_another_layout_than_the_usual_is_taken_where_it_is_clearly_faster(project: Path) -> None:
    def chosen(name: str) -> int:
        config = load(RunConfig, project / "run.yaml", [f"model.path={name}", "model.dtype=bfloat16"])
        machine = Machine.imagined(4, CARDS["H200"])
        best = layouts(config, machine)[0].settled.rollout.tensor_model_parallel_size
        assert best > 1  # by the estimate engines of several GPUs are a little faster for both
        return choose_layout(config, machine).rollout.tensor_model_parallel_size

    assert chosen("7B") == 1
    assert chosen("32B") == 4


@pytest.mark.parametrize(
    ("words", "count", "name"),
    [
        ("2xH100", 2, "H100"),
        ("H200", 1, "H200"),
        ("8 x A100", 8, "A100"),
        ("4xrtx4090", 4, "RTX 4090"),
        ("1xb200", 1, "B200"),
    ],
)
def test_gpus_in_words(words: str, count: int, name: str) -> None:
    assert read_gpus(words) == (count, CARDS[name])


@pytest.mark.parametrize("words", ["2xV100", "0xH100", "many", ""])
def test_unknown_gpus_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="write a number and a card, say 2xH100, with one of H100, H200"):
        read_gpus(words)


def test_cards_by_the_drivers_names() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA L40S": "L40S",
    }
    assert {name: card_of(name) for name in names} == {name: CARDS[card] for name, card in names.items()}
    assert card_of("Tesla T4") is None


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    for name, tree in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tree))
    (tmp_path / "run.yaml").write_text(
        "data: {train_files: [x.parquet], max_prompt_length: 512, max_response_length: 1024, "
        "train_batch_size: 32}\n"
        "model: {path: 3B}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "rollout: {n: 8}\n"
        "actor: {ppo_mini_batch_size: 16}\n"
        "reward: {functions: [{name: exact_match}]}\n"
        "trainer: {total_steps: 10}\n"
    )
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_best_layouts_of_gpus_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--gpus", "2xH100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["layout", "step", "s"]
    assert [re.split(r"  +", line)[0] for line in lines[1:4]] == [
        "2 learner ranks, 2 engines in turns on the same GPUs",
        "2 learner ranks, 1 engine of 2 GPUs in turns on the same GPUs",
        "1 learner rank, 1 engine",
    ]
    rates = [int(line.split()[-1].replace(",", "")) for line in lines[1:4]]
    assert rates == sorted(rates, reverse=True)
    # 13,653 were measured in turns; divided, 6,439 with layers that were not compiled.
    assert rates[0] == pytest.approx(13_653, rel=0.1)
    assert 6_439 < rates[2] < 0.65 * rates[0]
    assert lines[4].startswith(
        "`paceline train` takes: 2 learner ranks, 2 engines in turns on the same GPUs; "
    )
    assert "micro-batches of 8,704 tokens, recompute=none" in lines[4]


@pytest.mark.usefixtures("project")
def test_what_does_not_fit_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--gpus", "2xRTX4090", "model.path=32B"]) == 2
    out = capsys.readouterr().out
    refused = [line for line in out.splitlines() if line.startswith("does not fit: ")]
    layout = "2 learner ranks, 1 engine of 2 GPUs in turns on the same GPUs"
    assert refused[0].startswith(f"does not fit: {layout}: GPU 0")
    assert len(refused) == 2
    assert "`paceline train` takes" not in out


@pytest.mark.usefixtures("project")
def test_a_card_that_nobody_timed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--gpus", "4xA100", "--response-tokens", "300"]) == 0
    assert (
        "no step was ever timed on A100s: the estimate scales their published rates"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("project")
def test_without_a_gpu_here_it_asks_for_some(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(num_cores=2, gpus=()))
    assert main(["plan", "run.yaml"]) == 2
    assert "--gpus 2xH100" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_a_file_that_says_who_has_which_gpu_has_one_layout() -> None:
    machine = Machine.imagined(4, CARDS["H200"])
    tree = {
        "data": {"train_files": ["x.parquet"], "train_batch_size": 32},
        "model": {"path": "7B", "dtype": "bfloat16"},
        "actor": {"ppo_mini_batch_size": 16},
        "algorithm": {"adv_estimator": "grpo"},
        "rollout": {"n": 8},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1},
    }
    free = layouts(parse(RunConfig, tree), machine)
    assert len(free) == 6  # engines of 1, 2 and 4 GPUs in turns; 1, 2 or 3 learner ranks
    assert free == sorted(
        free, key=lambda layout: (bool(layout.refusal), layout.time.seconds if layout.time else 0)
    )
    given = layouts(parse(RunConfig, tree | {"learner": {"world_size": 3}}), machine)
    assert [layout.words for layout in given] == ["3 learner ranks, 1 engine"]
    assert choose_layout(parse(RunConfig, tree), machine).learner.world_size == 4


def watched(name: str, *, gen: float, update: float, **rollout: object) -> tuple[list[str], Expectation]:
    """What the view says in five steps of which the first is cold."""
    timed = TIMED[name]
    tree = timed.config.model_dump(mode="json", exclude_unset=True)
    tree["rollout"] |= rollout
    shape = ModelShape.of(SHAPES[timed.shape])
    assert shape is not None
    expectation = Expectation(config=parse(RunConfig, tree), shape=shape, card=CARDS[timed.card])
    step = gen + update + 1.5
    tokens = timed.prompts * 8 * (timed.prompt + timed.response)
    warm = {
        "timing_s/step": step,
        "timing_s/gen": gen,
        "timing_s/update_actor": update,
        "response_length/mean": float(timed.response),
        "perf/tokens_per_s": tokens / step,
    }
    cold = warm | {"timing_s/gen": 60.0, "timing_s/step": 90.0}
    view = NotedView()
    expecting = ExpectingView(view, expectation)
    expecting.step(0, {"val/reward/mean": 0.3})
    for number, row in enumerate((cold, warm, warm, warm, warm), start=1):
        expecting.step(number, row)
        if number < 4:
            assert view.notices == []
    assert view.steps == [0, 1, 2, 3, 4, 5]
    return view.notices, expectation


class NotedView:
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.steps: list[int] = []

    def milestone(self, text: str) -> None: ...

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def pulse(self) -> None: ...

    def close(self) -> None: ...


def test_warm_steps_are_held_against_the_estimate() -> None:
    (sentence,), expectation = watched("3B", gen=6.7, update=6.1)
    estimate = TIMED["3B"].estimate
    assert sentence == (
        "3 warm steps took 14.3 s (median): generation 6.7, update 6.1; expected for answers of this length: "
        f"{estimate.seconds:.1f}, {estimate.generation:.1f}, {estimate.update:.1f}"
    )
    assert expectation.step({"timing_s/gen": 1.0}) == ""


def test_a_slow_phase_is_told_with_what_to_look_at() -> None:
    (sentence,), _ = watched("3B", gen=10.0, update=9.0)
    assert sentence.endswith(
        "; generation is slow: the engine's GPU waits for its host, or is shared: look for other programs on "
        "its cores and in nvidia-smi; the update is slow: look in nvidia-smi for low clocks, high "
        "temperatures and other programs on the GPUs"
    )
    (sentence,), _ = watched("32B, averages on the host", gen=30.0, update=12.0, enforce_eager=True)
    assert "generation is slow: leave rollout.enforce_eager out" in sentence
    assert sentence.endswith("the update is slow: set actor.compile: true")


@pytest.mark.usefixtures("project")
def test_nothing_is_expected_where_too_little_is_known() -> None:
    timed = TIMED["3B"].config
    config = timed.model_copy(update={"model": timed.model.model_copy(update={"path": "3B"})})
    known = Machine.imagined(2, CARDS["H100"])
    assert Expectation.of(config, known) is not None
    assert Expectation.of(config, Machine(num_cores=2, gpus=(0, 1))) is None
    cpu = config.model_copy(update={"learner": config.learner.model_copy(update={"device": "cpu"})})
    assert Expectation.of(cpu, known) is None
    tools = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tools": ("t.py:f",)})})
    assert Expectation.of(tools, known) is None
