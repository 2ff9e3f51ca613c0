"""The layouts that a run may have on GPUs, and what `paceline plan` says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import main
from paceline.config.load import load, parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS, card_of, read_gpus
from paceline.core.errors import ConfigError
from paceline.sizing.layouts import Layout, choose_layout, layouts
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle
from support.timed_steps import write_project

KEEP_ALL = "actor.memory={recompute: none, keep_gathered: true, accumulate: true, offload: false}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    write_project(tmp_path)
    return tmp_path


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
    with pytest.raises(ConfigError, match="write a number and a card such as 2xH100, with one of H100, H200"):
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


@pytest.mark.usefixtures("project")
def test_the_best_layouts_of_gpus_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--gpus", "2xH100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["layout", "step", "s"]
    assert [re.split(r"  +", line)[0] for line in lines[1:4]] == [
        "2 learner ranks, 2 engines side by side on the same GPUs",
        "2 learner ranks, 1 engine of 2 GPUs side by side on the same GPUs",
        "1 learner rank, 1 engine",
    ]
    rates = [int(line.split()[-1].replace(",", "")) for line in lines[1:4]]
    assert rates == sorted(rates, reverse=True)
    # 14,658 were measured side by side; divided, 6,439 with layers that were not compiled.
    assert rates[0] == pytest.approx(14_658, rel=0.1)
    assert 6_439 < rates[2] < 0.65 * rates[0]
    assert lines[4].startswith(
        "`paceline train` takes: 2 learner ranks, 2 engines side by side on the same GPUs; "
    )
    assert "micro-batches of 8,704 tokens, recompute=0.9" in lines[4]


@pytest.mark.parametrize(
    ("name", "gpus", "settings", "sleep", "recompute"),
    [
        # Turns of 0.5 s for a form that saves 0.1 s of the update.
        ("3B", "2xH100", [], "never", 0.9),
        # Here it saves as much as turns cost, to within what an estimate can tell.
        ("1.5B", "1xH100", [], "always", "none"),
        # Beside engines there is room for the best form, or for none.
        ("0.5B", "1xH100", [], "never", "none"),
        ("7B", "2xH100", [], "always", 0.9),
        # What the file says stays.
        ("3B", "2xH100", ["rollout.sleep=always"], "always", "none"),
        ("1.5B", "1xH100", ["rollout.sleep=never"], "never", 0.9),
        ("3B", "2xH100", [KEEP_ALL, "actor.ppo_max_token_len_per_gpu=8704"], "always", "none"),
    ],
)
def test_engines_sleep_where_that_makes_a_step_shorter(
    project: Path, name: str, gpus: str, settings: list[str], sleep: str, recompute: object
) -> None:
    config = load(RunConfig, project / "run.yaml", [f"model.path={name}", "model.dtype=bfloat16", *settings])
    settled = settle(config, Machine.imagined(*read_gpus(gpus))).config
    assert (settled.rollout.sleep, settled.actor.memory.recompute) == (sleep, recompute)


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
        "no step was ever timed on A100s: the estimate scales the published rates of the card"
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


LONG = [
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=32",
    "data.max_response_length=8192",
    "rollout.max_num_seqs=256",
]
BOUND = ["barrier={mode: bounded, max_staleness: 1}"]
ADVICE = "barrier.mode=bounded with barrier.max_staleness=1"


@pytest.mark.parametrize(
    ("gpus", "more", "advised"),
    [
        ("8xH100", LONG, True),
        # Short answers: turns keep all GPUs busy.
        ("2xH100", [], False),
        # Not with a bound: prompts that are drawn late, and GPUs that the file gives.
        ("8xH100", [*LONG, "algorithm.dynamic_sampling.enable=true"], False),
        ("8xH100", [*LONG, "learner.world_size=4"], False),
        ("8xH100", [*LONG, *BOUND], False),
    ],
)
@pytest.mark.usefixtures("project")
def test_the_plan_says_where_a_bound_on_staleness_pays(
    capsys: pytest.CaptureFixture[str], gpus: str, more: list[str], advised: bool
) -> None:
    tokens = "3000" if more else "1024"
    assert main(["plan", "run.yaml", "--gpus", gpus, "--response-tokens", tokens, *more]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(ADVICE) == advised
    if advised:
        assert "3 learner ranks, 5 engines, " in last
        bounded, strict = map(float, re.findall(r"([\d.]+) s instead of ([\d.]+) \(", last)[0])
        assert 0.5 * strict < bounded < 0.9 * strict


@pytest.mark.usefixtures("project")
def test_the_plan_of_a_file_without_a_section_for_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(Path("run.yaml").read_text())
    del tree["algorithm"]
    Path("plain.yaml").write_text(yaml.safe_dump(tree))
    assert main(["plan", "plain.yaml", "--gpus", "8xH100", "--response-tokens", "3000", *LONG]) == 0
    assert ADVICE in capsys.readouterr().out


def test_with_a_bound_gpus_are_divided_so_that_neither_side_waits_long(project: Path) -> None:
    config, machine = (
        load(RunConfig, project / "run.yaml", [*LONG, *BOUND]),
        Machine.imagined(8, CARDS["H100"]),
    )
    compared = layouts(config, machine, response_tokens=2000)
    assert not [layout.words for layout in compared if "same GPUs" in layout.words]
    assert len(compared) == 7
    for layout in compared:
        time = layout.time
        assert time is not None
        longer = max(time.generation, time.scoring + time.update)
        assert 0 < time.seconds - longer - time.weights < 0.3, "the shorter side costs nothing"
    best = compared[0].settled
    assert (best.learner.world_size, best.rollout.replicas) == (3, 5)
    # If all answers may have 8,192 tokens, there is more to learn from than to wait for.
    assert choose_layout(config, machine).learner.world_size == 4
    # On one GPU both share what there is.
    small = load(RunConfig, project / "run.yaml", ["model.path=0.5B", *BOUND])
    [only] = layouts(small, Machine.imagined(1, CARDS["H100"]))
    assert only.time is not None
    assert not only.time.overlaps
