"""The report of a run with known numbers, and the closing lines."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import metrics
from paceline.cli.live.table import LiveView
from paceline.cli.live.view import step_line
from paceline.cli.metrics import Metric
from paceline.cli.report.charts import (
    CARD,
    WIDE,
    Series,
    _smooth,
    line_chart,
    short,
    stacked_bars,
    ticks_between,
)
from paceline.cli.report.data import phase_seconds, read_run
from paceline.cli.report.summary import closing_lines
from paceline.cli.report.write import write_report
from paceline.core.errors import DataError
from paceline.service import process_ends
from paceline.service.process_ends import ProcessEnd
from support.synthetic_run import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", num_steps=60)


def svg(text: str) -> ET.Element:
    return ET.fromstring(re.sub(r"</svg>.*", "</svg>", text, flags=re.DOTALL))


def test_the_page_stands_alone_and_is_well_formed(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    # The script itself is there, without a source; it fetches only where `paceline ui` serves the page.
    assert re.findall(r"(?:\ssrc|href)\s*=|@import|url\(|data-live=", text) == []
    open_tags: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert open_tags == []


def test_it_shows_every_curve_that_was_asked_for(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    for title in (
        "Reward", "Seconds per phase", "KL", "Clip fractions", "Entropy", "Value loss", "Gradient norm",
        "Response length", "Mismatch of rollout and learner", "Sample trajectories", "Events of note",
    ):  # fmt: skip
        assert re.search(rf"<(h2|b)>{title}</\1>", text), title
    assert "0.310 → 0.920" in text
    assert "512" in text
    assert "3 refused" in text
    assert "step 60: validation 0.92" in text


def test_a_line_in_the_table_of_metrics_puts_a_metric_on_the_page_and_in_the_live_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"actor/sparsity": 0.125, "actor/density": 0.875}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}))
    assert "Sparsity" not in write_report(tmp_path).read_text()
    added = (
        Metric("actor/sparsity", "Sparsity", "zeros", column="sparse", format=".1%"),
        Metric("actor/density", "Sparsity", "others"),
    )
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, *added))
    text = write_report(tmp_path).read_text()
    assert "<b>Sparsity</b>" in text
    assert "step 1: zeros 0.125" in text
    assert "step 1: others 0.875" in text
    assert step_line(1, 2, values) == "step 1/2  sparse 12.5%"
    screen = io.StringIO()
    view = LiveView("run", 2, console=Console(file=screen, width=160, color_system=None))
    view.step(1, values)
    view.close()
    header, row = (line.split() for line in screen.getvalue().splitlines()[-2:])
    assert (header[-1], row) == ("sparse", ["1/2", "12.5%"])


def test_a_model_cannot_write_into_the_page_and_secrets_stay_out(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    assert "<b>Answer:</b>" not in text
    assert "&lt;b&gt;Answer:&lt;/b&gt;" in text
    assert "&lt;script&gt;alert(1)" in text
    assert "hunter2" not in text
    assert "://***@10.0.0.1:6379/0" in text


def test_only_events_of_note_are_listed(run_dir: Path) -> None:
    data = read_run(run_dir)
    assert [event.name for event in data.events] == ["run", "group_dropped", "checkpoint", "end"]
    assert data.verdicts == {"admitted": 512, "duplicate": 3}
    assert data.events[0].at_s == 0


def test_the_guards_firings_are_summed_up_by_rule(run_dir: Path) -> None:
    kl, norm = read_run(run_dir).fired
    assert (kl.name, list(kl.steps), kl.skipped, kl.worst, kl.worst_step) == (
        *("ppo_kl (actor)", [7, 8, 9, 20], 2, 0.06, 20),
    )
    assert (kl.threshold, kl.actions) == (0.05, {"warn": 3, "skip": 1})
    # Ten times the running median of that step.
    assert (norm.name, norm.worst, norm.threshold, norm.sense) == ("grad_norm (critic)", 6.0, 5.0, "above")
    text = write_report(run_dir).read_text()
    assert "<h2>Guard</h2>" in text
    assert "<td>7-9, 20</td><td>warn 3x, skip</td><td>2</td><td>0.06 in step 20</td>" in text


def test_phases_and_the_unclaimed_rest_add_up_to_the_step(run_dir: Path) -> None:
    data = read_run(run_dir)
    steps, layers = phase_seconds(data)
    assert steps == [float(step) for step in range(1, 61)]
    assert "learn" not in layers, "it would count the learner's phases twice"
    totals = dict(data.points("timing_s/step"))
    for i, step in enumerate(steps):
        assert sum(values[i] for values in layers.values()) == pytest.approx(totals[step])
    assert layers["other"][0] == pytest.approx(0.2)


def test_samples_are_of_the_first_the_last_and_the_validation_step_best_first(run_dir: Path) -> None:
    samples = read_run(run_dir).samples
    assert [sample.title for sample in samples] == [
        "Training, step 1",
        "Training, step 60",
        "Validation after step 60",
    ]
    for step_samples in samples:
        rewards = [row["reward"] for row in step_samples.rows]
        assert len(rewards) == 6
        assert rewards == sorted(rewards, reverse=True)
        assert {0.0, 1.0} == set(rewards)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text("trainer: {}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/reward/mean": 0.5}\n{"step": 1, "critic/sco')
    text = write_report(tmp_path).read_text()
    assert "0.500 → 0.500" in text
    assert closing_lines(tmp_path) == [
        "validation reward: 0.5000 (step 0)",
        f"run directory: {tmp_path}",
        f"report: {tmp_path / 'report.html'}",
    ]


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        write_report(tmp_path)


def test_closing_lines_compare_before_and_after(run_dir: Path) -> None:
    assert closing_lines(run_dir)[0] == "validation reward: 0.3100 before (step 0), 0.9200 after (step 60)"


def test_a_line_runs_from_corner_to_corner() -> None:
    chart = svg(line_chart([Series(label="x", points=[(0, 0.0), (10, 1.0)])]))
    points = chart.find(".//polyline").get("points")  # type: ignore[union-attr]
    left, top, right, bottom = 54, 12, CARD.width - 12, CARD.height - 26
    assert points == f"{left:.1f},{bottom:.1f} {right:.1f},{top:.1f}"


def test_bars_stack_without_gaps_to_their_total() -> None:
    chart = svg(stacked_bars([1, 2], {"a": [1.0, 3.0], "b": [2.0, 0.0]}, WIDE))
    rects = chart.findall(".//rect")
    assert len(rects) == 3, "a layer of 0 seconds has no bar"
    low, high = rects[0], rects[2]
    assert float(high.get("y", 0)) + float(high.get("height", 0)) == pytest.approx(
        float(low.get("y", 0)), abs=0.1
    )
    assert float(high.get("height", 0)) == pytest.approx(2 * float(low.get("height", 0)), abs=0.1)


def test_many_steps_become_fewer_bars_of_the_same_mean() -> None:
    chart = svg(stacked_bars(range(1000), {"a": [1.0] * 1000}, WIDE))
    heights = {rect.get("height") for rect in chart.findall(".//rect")}
    assert len(chart.findall(".//rect")) == 112
    assert len(heights) == 1


def test_the_trend_of_a_straight_line_is_that_line() -> None:
    line = [(float(x), 3.0 - 0.5 * x) for x in range(50)]
    assert [y for _, y in _smooth(line)] == pytest.approx([y for _, y in line])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.31, 0.92, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3e-6, 2e-6, [-3e-6, -2e-6, -1e-6, 0, 1e-6, 2e-6]),
        (5100, 5230, [5100, 5150, 5200, 5250]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks_between(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    "values", [[3e-14, 5e-14], [2.0, 2.0], [0.0, 0.0], [1e9, 1e9 + 1e-3], [-1e-300, 1e-300]]
)
def test_any_range_can_be_drawn(values: list[float]) -> None:
    chart = svg(line_chart([Series(label="x", points=list(enumerate(values)))]))
    points = chart.find(".//polyline").get("points")  # type: ignore[union-attr]
    ys = [float(pair.split(",")[1]) for pair in str(points).split()]
    assert all(12 <= y <= CARD.height - 26 for y in ys)


def test_axis_numbers_are_short() -> None:
    assert [short(x) for x in (0, 0.25, 5200, 52_000, 3_200_000, 1e-4, 2.5e-6, -2e-10)] == [
        "0", "0.25", "5200", "52k", "3.2M", "1e-4", "2.5e-6", "-2e-10",
    ]  # fmt: skip


def test_a_process_that_ended_is_an_event_of_note_in_its_place(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=6)
    journal = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began, ended = journal[0]["time"], journal[-1]["time"]
    end = ProcessEnd(
        time=(began + ended) / 2, name="learner-1", outcome="killed by SIGSEGV", step=3, restarts=True
    )
    process_ends.append(folder, end)
    events = read_run(folder).events
    (place,) = [i for i, event in enumerate(events) if event.name == "process"]
    assert events[place].text.startswith("learner-1 was killed by SIGSEGV in step 3 at ")
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert 0 < events[place].at_s < ended - began
    assert "learner-1 was killed by SIGSEGV in step 3" in write_report(folder).read_text()
