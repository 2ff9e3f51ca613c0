"""The report of a run with known numbers, and the closing lines."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel

from paceline.core.errors import DataError
from paceline.service import process_ends
from paceline.service.process_ends import ProcessEnd
from paceline.show import metrics
from paceline.show.live.table import LiveView
from paceline.show.live.view import step_line
from paceline.show.metrics import ShownMetric
from paceline.show.report import journal as journal_view
from paceline.show.report import lines as report_lines
from paceline.show.report.content import RunContent
from paceline.show.report.firings import fired_rules
from paceline.show.report.lines import GrowingFile, read_jsonl
from paceline.show.report.page import page, to_json
from paceline.show.report.step_table import StepTable
from paceline.show.report.summary import closing_lines
from paceline.show.report.timeline import timelines
from paceline.show.report.token_texts import TokenTexts
from paceline.show.report.write import write_report
from support.synthetic_run import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", num_steps=60)


def frozen(text: str, name: str = "frozen") -> Any:
    """The data in a page."""
    (data,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


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


def test_a_line_in_the_table_of_metrics_puts_a_metric_on_the_page_and_in_the_live_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"actor/sparsity": 0.125, "actor/density": 0.875}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")
    assert "Sparsity" not in write_report(tmp_path).read_text()
    added = (
        ShownMetric("actor/sparsity", "Sparsity", "zeros", column="sparse", format=".1%"),
        ShownMetric("actor/density", "Sparsity", "others"),
    )
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, *added))
    text = write_report(tmp_path).read_text()
    chart = next(chart for chart in frozen(text, "meta")["charts"] if chart["title"] == "Sparsity")
    assert [metric["label"] for metric in chart["metrics"]] == ["zeros", "others"]
    assert frozen(text)["metrics"]["columns"] == {name: [value] for name, value in values.items()}
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
    assert "\\u003cscript>alert(1)" in text
    assert text.count("</script>") == text.count("<script") == 3
    assert "hunter2" not in text
    assert "://***@10.0.0.1:6379/0" in text


def test_only_events_of_note_are_listed(run_dir: Path) -> None:
    journal = RunContent(run_dir).journal()
    loud = [(note["name"], note["level"]) for note in journal["notes"] if not note["quiet"]]
    assert loud == [
        ("run", "info"),
        ("member", "bad"),
        ("member", "info"),
        ("group_dropped", "bad"),
        ("checkpoint", "info"),
        ("end", "info"),
    ]
    assert journal["verdicts"] == {"admitted": 512, "duplicate": 3}
    assert journal["notes"][0]["time"] == journal["began"]
    steps = [(note["step"], note["level"]) for note in journal["notes"] if note["quiet"]]
    assert steps == [(5, "warn"), (7, "warn"), (8, "warn"), (9, "warn"), (20, "warn"), (20, "bad")]


def test_the_fleet_as_the_journal_last_saw_it(run_dir: Path) -> None:
    learner, rollout = RunContent(run_dir).journal()["fleet"]
    assert (learner["state"], learner["starts"], learner["deaths"]) == ("ready", 1, 0)
    assert (rollout["state"], rollout["starts"], rollout["deaths"], rollout["version"]) == (
        "serving",
        2,
        1,
        60,
    )


def test_the_guards_firings_are_summed_up_by_rule(run_dir: Path) -> None:
    kl, norm = fired_rules([e for e in read_jsonl(run_dir / "events.jsonl") if e["event"] == "guard"])
    assert (kl.name, list(kl.steps), kl.skipped, kl.worst, kl.worst_step) == (
        *("ppo_kl (actor)", [7, 8, 9, 20], 2, 0.06, 20),
    )
    assert (kl.threshold, kl.actions) == (0.05, {"warn": 3, "skip": 1})
    # Ten times the running median of that step.
    assert (norm.name, norm.worst, norm.threshold, norm.sense) == ("grad_norm (critic)", 6.0, 5.0, "above")
    assert [rule["steps"] for rule in RunContent(run_dir).journal()["guard"]] == ["7-9, 20", "5"]


def test_training_rewards_are_compared_by_means_of_steps_validations_one_by_one(run_dir: Path) -> None:
    head = RunContent(run_dir).head()
    rewards = [row["critic/score/mean"] for row in read_jsonl(run_dir / "metrics.jsonl") if row["step"] > 0]
    assert list(head["headlines"]) == ["Validation reward", "Validation reward (hard)", "Training reward"]
    assert head["headlines"]["Validation reward"] == [0.31, 0.92, 1]
    assert head["headlines"]["Validation reward (hard)"] == [0.5, 0.625, 1]
    assert head["headlines"]["Training reward"] == pytest.approx([fmean(rewards[:5]), fmean(rewards[-5:]), 5])
    assert (head["step"], head["total_steps"], head["end"]) == (60, 60, "60 steps done")


def test_a_timeline_is_of_the_last_execution_of_a_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=4)
    spans = folder / "spans.jsonl"
    again = [{**span, "trace_id": "f" * 32} for span in list(read_jsonl(spans))[4:8]]
    again[1] |= {"instance": "rollout-7", "error": "broken"}
    with spans.open("a") as file:
        file.write("".join(json.dumps(span) + "\n" for span in again) + '{"name": "step", "torn')
    lines = timelines(spans, {2, 3, 9})
    assert sorted(lines) == [2, 3]
    assert [(s["who"], s["start"], s["seconds"], s["error"]) for s in lines[2]] == [
        ("controller", 0.0, 4.0, ""),
        ("controller", 0.0, 1.4, ""),
        ("rollout-7", 0.1, 1.2, "broken"),
        ("learner-0", 1.5, 2.4, ""),
    ]
    assert lines[3][2]["who"] == "rollout-0"


def test_a_report_holds_samples_of_the_first_the_middle_and_the_last_step(run_dir: Path) -> None:
    data = frozen(write_report(run_dir).read_text())
    assert list(data["samples"]) == ["step_000001", "step_000060", "val_000060"]
    for name, rows in data["samples"].items():
        rewards = [row["reward"] for row in rows]
        assert len(rewards) == 60
        assert rewards == sorted(rewards, reverse=True)
        assert {0.0, 1.0} == set(rewards)
        assert rows[0]["components"] == {"exact_match": 1.0, "brevity": 0.5}
        detail = data["details"][name][str(rows[3]["row"])]
        assert detail["response"] == rows[3]["response"]
        assert (detail["engine"], detail["learner"]) == ([-0.1, -0.2, -3.0, -0.1], [-0.1, -0.25, -3.0, -0.1])


def test_tokens_are_shown_by_their_texts_together_the_response(tmp_path: Path) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 数 ok"
    texts = TokenTexts([tmp_path / "none", tmp_path]).of(tokenizer.encode(text).ids)
    assert "".join(texts) == text
    assert texts[:5] == ["G", "r", "", "ü", ""], "bytes of a letter stand at its last"
    assert TokenTexts([]).of([7, 8]) == ["7 ", "8 "]


def test_only_what_is_new_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    file = GrowingFile(path)
    assert list(file.new()) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(file.new()) == [{"a": 1}, {"a": 2}]
    with path.open("a") as more:
        more.write(": 3}\n")
    assert (list(file.new()), list(file.new())) == ([{"a": 3}], [])
    generation = file.generation
    path.write_text('{"a": 9}\n')
    assert (list(file.new()), file.generation) == ([{"a": 9}], generation + 1)


def test_of_a_long_file_some_lines_are_parsed_and_what_follows_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": step, **({"val/reward/mean": step} if step in (701, 803) else {})} for step in range(1000)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda line: (parsed.append(line), loads(line))[1])
    file = GrowingFile(path)
    steps = [row["step"] for row in file.new(at_most=20)]
    assert {*range(50), 701, 803, *range(950, 1000)} < set(steps)
    assert steps == sorted(steps)
    assert len(parsed) == len(steps) <= 2 * 50 + 20 + 2
    assert max(b - a for a, b in pairwise(steps)) <= 54
    with path.open("a") as more:
        more.write('{"step": 1000}\n{"step": 1001}\n')
    assert [row["step"] for row in file.new(at_most=20)] == [1000, 1001]


def test_lines_that_come_while_a_long_file_is_read_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    file = GrowingFile(path)
    reading = file.new(at_most=20)
    seen = [next(reading)["step"]]
    with path.open("a") as more:
        more.write('{"step": 1000}\n')
    seen += [row["step"] for row in reading]
    seen += [row["step"] for row in file.new(at_most=20)]
    assert seen[-2:] == [999, 1000]


def test_a_journal_shows_the_same_whatever_portions_it_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = [{"event": "run", "step": 0}]
    for step in range(1, 6):
        servers = ["rollout-0", "rollout-1"] if step % 2 else ["rollout-1"]
        events += [{"event": "phase", "step": step}, {"event": "trajectory", "verdict": "admitted"}]
        events += [{"event": "commit", "version": step, "digest": "d", "servers": servers}]
        events += [{"event": "member", "member": "rollout-1", "what": "dead", "reason": '"event":"run"'}]
    events += [{"event": "step", "step": 6}, {"event": "trajectory", "verdict": "duplicate"}]
    events += [{"event": "commit", "version": 6, "digest": "d", "servers": ["rollout-1"]}]
    lines = [
        json.dumps({"n": n, "time": 5.0 + n, **event}, separators=(",", ":"))
        for n, event in enumerate(events)
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + '\n{"event":"end","ok":tr')
    shown = RunContent(tmp_path).journal()
    assert {member["name"]: member["version"] for member in shown["fleet"]} == {
        "rollout-0": 5,
        "rollout-1": 6,
    }
    assert shown["verdicts"] == {"admitted": 5, "duplicate": 1}
    deaths = [note for note in shown["notes"] if note["name"] == "member"]
    assert [note["step"] for note in deaths] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(report_lines, "_PORTION_BYTES", 1)
    assert RunContent(tmp_path).journal() == shown


def test_a_long_journal_is_not_parsed_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = [{"event": "run", "step": 0}]
    for step in range(1, 200):
        events += [{"event": "phase", "step": step}]
        events += [{"event": "trajectory", "id": f"train:{step}:0:0", "verdict": "admitted"}] * 3
        events += [{"event": "commit", "version": step, "servers": ["rollout-0"]}]
    events += [{"event": "trajectory", "verdict": "duplicate"}, {"event": "lost", "member": "rollout-0"}]
    events += [{"event": "commit"}]
    lines = [json.dumps({"n": n, "time": 5.0 + n, **event}) + "\n" for n, event in enumerate(events)]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda line: (parsed.append(line), loads(line))[1])
    shown = RunContent(tmp_path).journal()
    assert len(parsed) == 4  # run, lost, the commit of nobody, the last one's servers
    assert [member["version"] for member in shown["fleet"]] == [199]
    assert shown["verdicts"] == {"admitted": 597, "duplicate": 1}
    assert [(note["name"], note["step"]) for note in shown["notes"]] == [("run", 0), ("lost", 199)]
    assert shown["began"] == 5.0


def test_the_head_and_the_curves_do_not_wait_for_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of 100,000 steps it has half a gigabyte."""
    content = RunContent(write_run(tmp_path / "run", num_steps=6))
    monkeypatch.setattr(GrowingFile, "new_portions", None)
    assert content.head()["end"] == "60 steps done"
    assert content.metrics()["steps"] == list(range(7))
    assert content.steps_of_interest()
    with pytest.raises(TypeError):
        content.journal()


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([("run", "")], None),
        ([("run", ""), ("end", "stopped")], "stopped"),
        ([("run", ""), ("end", "stopped"), *[("member", "left")] * 9], "stopped"),
        ([("run", ""), ("end", "stopped"), ("run", ""), ("phase", "")], None),
        ([("end", "stopped"), *[("phase", "")] * 99], None),
        ([("end", "first"), ("run", ""), ("end", "second")], "second"),
        ([("end", "stopped"), ("lost", 'the words "event":"run"')], "stopped"),
        ([], None),
    ],
)
def test_a_run_has_ended_if_only_its_members_left_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, str]], end: str | None
) -> None:
    monkeypatch.setattr(journal_view, "_END_BYTES", 1000)
    for separators in ((",", ":"), (", ", ": ")):
        lines = [
            json.dumps({"n": n, "event": name, "message": message}, separators=separators) + "\n"
            for n, (name, message) in enumerate(events)
        ]
        (tmp_path / "events.jsonl").write_text("".join(lines) + '{"event":"run","to')
        assert RunContent(tmp_path).head()["end"] == end


def test_a_portion_without_other_verdicts_is_counted_as_the_rest(tmp_path: Path) -> None:
    for verdicts in (["admitted"] * 5, ["admitted", "stale", "admitted"], ["duplicate"] * 2, []):
        events = [{"event": "run", "time": 1.0}, *({"event": "trajectory", "verdict": v} for v in verdicts)]
        lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in events]
        (tmp_path / "events.jsonl").write_text("".join(lines))
        assert RunContent(tmp_path).journal()["verdicts"] == Counter(verdicts)


def test_a_long_run_is_sent_in_part_and_what_follows_as_a_whole() -> None:
    table = StepTable()
    table.add({"step": step, "x": step / 3, **({"y": 1.0} if step > 98 else {})} for step in range(100))
    part = table.part(0, 10)
    assert (part["steps"][0], part["steps"][-1], len(part["steps"]), part["num_lines"]) == (0, 99, 10, 100)
    assert part["columns"]["x"][-1] == 33.0
    assert part["columns"]["y"] == [None] * 9 + [1.0]
    assert table.part(97, 10)["steps"] == [97, 98, 99]
    table.add([{"step": 50, "x": 7.0}])
    assert dict(table.points("x"))[50] == 7.0


def test_numbers_that_are_not_finite_reach_the_page_as_null() -> None:
    assert json.loads(to_json({"a": [float("nan"), 1.0], "b": float("inf")})) == {"a": [None, 1.0], "b": None}


def test_no_text_breaks_out_of_the_pages_data() -> None:
    text = page("</title><script>", {"x": "</script><script>alert(1)</script>"})
    assert text.count("<script") == 3
    assert frozen(text) == {"x": "</script><script>alert(1)</script>"}


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text("trainer: {}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/reward/mean": 0.5}\n{"step": 1, "critic/sco')
    text = write_report(tmp_path).read_text()
    assert frozen(text)["runs"][0]["headlines"]["Validation reward"] == [0.5, 0.5, 1]
    assert closing_lines(tmp_path) == [
        "validation reward: 0.5000 (step 0)",
        f"run directory: {tmp_path}",
        f"report: {tmp_path / 'report.html'}",
    ]


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        write_report(tmp_path)


def test_closing_lines_compare_before_and_after(run_dir: Path) -> None:
    assert closing_lines(run_dir)[:2] == [
        "validation reward: 0.3100 before (step 0), 0.9200 after (step 60)",
        "validation reward (hard): 0.5000 before (step 0), 0.6250 after (step 60); best 0.7500 (step 30)",
    ]


def test_a_process_that_ended_is_an_event_of_note_in_its_place(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=6)
    journal = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began, ended = journal[0]["time"], journal[-1]["time"]
    end = ProcessEnd(
        time=(began + ended) / 2, name="learner-1", outcome="killed by SIGSEGV", step=3, restarts=True
    )
    process_ends.append(folder, end)
    notes = RunContent(folder).journal()["notes"]
    (note,) = [note for note in notes if note["name"] == "process"]
    assert note["text"].startswith("learner-1 was killed by SIGSEGV in step 3 at ")
    assert (note["step"], note["level"]) == (3, "bad")
    assert [note["time"] for note in notes] == sorted(note["time"] for note in notes)
    assert "learner-1 was killed by SIGSEGV in step 3" in write_report(folder).read_text()
