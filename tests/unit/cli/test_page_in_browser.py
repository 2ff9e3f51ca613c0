"""The page in a browser: what is drawn, what is under the pointer, zoom, filters, tokens; on a phone, too."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.show.report.content import RunContent
from paceline.show.report.page import page
from paceline.show.report.write import frozen
from paceline.show.ui.runs import ServedRun, ServedRuns
from paceline.show.ui.serve import Listen, open_server
from paceline.show.ui.server import PageApp
from support.browser import HELPERS, dom, needs_chromium, probe
from support.synthetic_run import write_run

pytestmark = needs_chromium

_DESKTOP = """
async function probe() {
  await wait(400);
  const seen = {};
  seen.charts = all("figure").filter(f => !f.hidden).map(f => f.querySelector("figcaption b").textContent);
  seen.tiles = all(".tile").map(t => t.textContent);
  const marks = level => all(`path.mark.${level}`, figure("Reward")).length;
  seen.marks = [marks("info"), marks("warn"), marks("bad")];
  point("Reward", 1);
  seen.last = tip();
  point("Entropy", 0.35);
  seen.cursors = all("line.cursor").length;
  set("input[type=range]", "0");
  const before = paths("Entropy");
  set("input[type=range]", "0.9");
  seen.smoothed = paths("Entropy").length - before.length;
  const entropy = figure("Entropy");
  entropy.querySelector("button").click();
  seen.log = paths("Entropy")[0] !== before[0];
  point("Entropy", 0.25, "pointerdown"); point("Entropy", 0.75); point("Entropy", 0.75, "pointerup");
  await wait(50);
  seen.range = all(".toolbar input[type=number]").map(field => Number(field.value));
  point("Value loss", 0); seen.left = tip();
  point("Value loss", 0.1, "pointerdown"); point("Value loss", 0.1, "pointerup");
  await wait(200);
  seen.timeline = document.querySelector("figure.timeline").textContent;
  all("figure.timeline rect.span")[0]?.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
  seen.span = tip();
  set("select[aria-label=step]", "step_000060");
  all("#samples select")[0].value = "step_000060";
  all("#samples select")[0].dispatchEvent(new Event("change"));
  await wait(200);
  seen.rows = document.querySelector("#samples .none").textContent;
  set("select[aria-label=order]", "reward, lowest first");
  seen.lowest = all("#samples .facts b")[0].textContent;
  set("input[aria-label='least reward']", "1");
  seen.rewarded = [...new Set(all("#samples .facts b").map(b => b.textContent))];
  set("input[aria-label='least reward']", "");
  set("select[aria-label=order]", "reward, highest first");
  set("input[aria-label=prompt]", "3");
  seen.prompt = all("#samples article").length;
  set("input[aria-label=prompt]", "");
  set("#samples input[type=search]", "no such text");
  seen.none = all("#samples article").length;
  set("#samples input[type=search]", "");
  seen.markup = all("#samples article b").filter(b => b.textContent === "Answer:").length;
  all("#samples article button")[0].click();
  await wait(200);
  const tokens = all("#samples .token");
  seen.tokens = tokens.map(token => token.textContent);
  seen.given = all("#samples .given").map(token => token.textContent);
  seen.between = all("#samples .segment").map(rule => [rule.textContent, rule.nextSibling.textContent]);
  seen.painted = new Set(tokens.map(token => token.style.background)).size > 1;
  tokens[1].dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
  seen.token = tip();
  seen.coloured = all("#samples .none select option").map(option => option.textContent);
  seen.fleet = all("#fleet tbody tr").map(row => all("td", row).map(cell => cell.textContent));
  seen.guard = all("#events table")[0].textContent;
  seen.events = all("table.events td b").map(b => b.textContent);
  seen.evaluations = all("#evaluations table").map(table => all("tr", table).map(row =>
    all("th, td", row).map(cell => cell.textContent)));
  seen.best = all("#evaluations b").map(cell => cell.textContent);
  seen.sets = all(".key", figure("Reward")).map(key => key.textContent);
  all("#evaluations button").at(-1).click();
  await wait(200);
  seen.evaluated = document.querySelector("figure.timeline").textContent;
  return seen;
}
"""

_REWARD = """
async function probe() {
  await wait(400);
  const section = all("section").find(part => part.querySelector("h2")?.textContent === "Reward");
  return {hidden: section.hidden, keys: all(".key", section).map(key => key.textContent)};
}
"""

_FLEET = """
async function probe() {
  await wait(400);
  const fleet = document.querySelector("#fleet");
  return {names: all("tbody tr", fleet).map(row => row.firstChild.textContent),
    counts: fleet.querySelector("p").textContent, height: fleet.querySelector(".scroll").offsetHeight};
}
"""

_PHONE = """
async function probe() {
  await wait(400);
  const beyond = node => !node.hidden && node.getBoundingClientRect().right > innerWidth + 1;
  const parts = all("figure, article, .tile, .toolbar, h1");
  const wide = parts.filter(beyond).map(node => node.textContent.slice(0, 60));
  const sizes = all("figure svg text").map(text => parseFloat(getComputedStyle(text).fontSize));
  return {wide, page: document.documentElement.scrollWidth - innerWidth, smallest: Math.min(...sizes),
    hidden: all("figure").filter(f => f.hidden).length};
}
"""


_LABELS = """
async function probe() {
  await wait(400);
  const labels = all("figure:not([hidden]) > svg text");
  const texts = list => list.map(t => t.textContent);
  // A number has arrows at its right, which need 20 pixels.
  const inputs = all("#samples input[type=number]").filter(input => {
    const style = getComputedStyle(input), pen = document.createElement("canvas").getContext("2d");
    pen.font = style.font;
    const room = input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 20;
    return pen.measureText(input.placeholder).width > room;
  });
  return {all: texts(labels), cut: texts(labels.filter(t => t.getBBox().x < 0)),
    inputs: inputs.map(input => input.placeholder)};
}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo", num_steps=60)
    return page("demo", frozen(RunContent(folder)))


@pytest.fixture(scope="module")
def seen(text: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return probe(text, HELPERS + _DESKTOP, tmp_path_factory.mktemp("browser"))


def test_charts_tiles_and_marks(seen: Any) -> None:
    assert {"Reward", "Seconds per phase", "KL", "Entropy", "Learning rate"} <= set(seen["charts"])
    assert "Utilisation" not in seen["charts"], "a chart without a number is not shown"
    assert any("0.310 → 0.920" in tile for tile in seen["tiles"])
    assert seen["marks"] == [2, 3, 3]


def test_values_of_the_step_under_the_pointer(seen: Any) -> None:
    assert seen["last"].startswith("step 60")
    assert "validation0.92" in seen["last"]
    assert seen["cursors"] > 10, "all charts show the step"


def test_smoothing_and_logarithmic_scale(seen: Any) -> None:
    assert seen["smoothed"] == 1, "a line over the pale one of the values"
    assert seen["log"]


def test_dragging_zooms_all_charts(seen: Any) -> None:
    low, high = seen["range"]
    assert low == pytest.approx(1 + 59 * 0.25, abs=1)
    assert high == pytest.approx(1 + 59 * 0.75, abs=1)
    assert seen["left"].startswith("step 16"), "the chart beside it"


def test_a_click_shows_that_steps_work(seen: Any) -> None:
    assert re.match(r"Step (1|30|31)\D", seen["timeline"]), "the nearest of those in the file"
    assert "rollout-0" in seen["timeline"]
    assert seen["span"].startswith("controller step")


def test_samples_can_be_filtered(seen: Any) -> None:
    assert seen["rows"] == "20 of 60 that match, 60 here"
    assert (seen["lowest"], seen["rewarded"]) == ("0", ["1"])
    assert seen["prompt"] in (3, 4)
    assert (seen["none"], seen["markup"]) == (0, 0)


def test_tokens_with_both_log_probs(seen: Any) -> None:
    assert seen["painted"]
    assert "engine -0.2" in seen["token"]
    assert "learner -0.25, apart 0.05" in seen["token"]
    assert seen["coloured"] == ["engine's log-prob", "learner's log-prob", "their difference"]


def test_what_was_not_sampled_and_where_a_segment_begins(seen: Any) -> None:
    assert seen["tokens"] == ["4 ", "5 ", "7 "]
    assert seen["given"] == ["6 "]
    assert seen["between"] == [["segment 2", "6 "]]


def test_evaluations_by_set_and_step(seen: Any) -> None:
    unnamed, hard = seen["evaluations"]
    heads = ["step", "reward", "avg@16", "maj@16", "pass@2", "pass@16", "cut off", "tokens", "prompts"]
    assert hard == [
        heads,
        ["0", "0.500 [0.375, 0.625]", "0.500", "0.550", "0.600", "1.000", "0.250", "123", "40"],
        ["30", "0.750 [0.625, 0.875]", "0.750", "0.800", "0.850", "1.000", "0.250", "123", "40"],
        ["60", "0.625 [0.500, 0.750]", "0.625", "0.675", "0.725", "1.000", "0.250", "123", "40"],
    ]
    assert unnamed[:2] == [["step", "reward"], ["0", "0.310"]]
    assert seen["best"] == ["0.920", "0.750 [0.625, 0.875]"]
    assert "validation (hard)" in seen["sets"]
    assert "step 60" in seen["evaluated"]


def test_evaluations_of_several_runs(tmp_path: Path) -> None:
    """Run b has answered another set than a, each prompt four times."""
    data = frozen(RunContent(write_run(tmp_path / "a", num_steps=4)))
    folder = write_run(tmp_path / "b", num_steps=2)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("val/hard/", "val/easy/").replace("_at_16", "_at_4"))
    other = frozen(RunContent(folder))
    data["runs"] = [*data["runs"], *other["runs"]]
    data["of"] = {"a": data["metrics"], "b": other["metrics"]}
    script = """
    async function probe() {
      location.hash = "a,b";
      await wait(400);
      const cells = row => all("th, td", row).map(cell => cell.textContent);
      return {tables: all("#evaluations table").map(table => all("tr", table).map(cells)),
        heads: cells(all("#runs tr")[0]), best: all("#evaluations b").map(cell => cell.textContent)};
    }
    """
    of_one, of_each = "metrics() { return this.data.metrics; }", "metrics(run) { return this.data.of[run]; }"
    text = page("runs", data)
    assert of_one in text
    seen = probe(text.replace(of_one, of_each), HELPERS + script, tmp_path)
    unnamed, hard, easy = seen["tables"]
    assert unnamed == [
        ["run", "reward"],
        ["a: first, step 0", "0.310"],
        ["a: best, last, step 4", "0.920"],
        ["b: first, step 0", "0.310"],
        ["b: best, last, step 2", "0.920"],
    ]
    heads = ["run", "reward", "avg@16", "maj@16", "pass@2", "pass@16", "cut off", "tokens", "prompts"]
    rest = ["0.250", "123", "40"]
    assert hard == [
        heads,
        ["a: first, step 0", "0.500 [0.375, 0.625]", "0.500", "0.550", "0.600", "1.000", *rest],
        ["a: best, step 2", "0.750 [0.625, 0.875]", "0.750", "0.800", "0.850", "1.000", *rest],
        ["a: last, step 4", "0.625 [0.500, 0.750]", "0.625", "0.675", "0.725", "1.000", *rest],
        ["b", "–", *[""] * 7],
    ]
    assert [row[:2] for row in easy] == [
        ["run", "reward"],
        ["a", "–"],
        ["b: first, step 0", "0.500 [0.375, 0.625]"],
        ["b: best, step 1", "0.750 [0.625, 0.875]"],
        ["b: last, step 2", "0.625 [0.500, 0.750]"],
    ]
    assert easy[0][2:6] == ["avg@4", "maj@4", "pass@2", "pass@4"]
    assert easy[3][2:] == ["0.750", "0.800", "0.850", "1.000", *rest]
    assert seen["best"] == ["0.920", "0.920", *["0.750 [0.625, 0.875]"] * 2]
    assert seen["heads"][4:6] == ["Validation reward", "Validation reward (hard)"]


def test_fleet_guard_and_events(seen: Any) -> None:
    assert ["rollout-0", "", "serving", "v60", "", "2", "1"] in seen["fleet"]
    assert "ppo_kl (actor)7-9, 20warn 3x, skip20.06 in step 20above 0.05" in seen["guard"]
    assert seen["events"] == ["run", "member", "member", "group_dropped", "checkpoint", "end"]


@pytest.mark.parametrize(
    ("left_out", "drawn"), [("critic/score/", True), (("critic/", "reward/", "val"), False)]
)
def test_a_reward_without_a_total_shows_its_parts_and_an_empty_section_is_hidden(
    left_out: Any, drawn: bool, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "demo", num_steps=3)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not name.startswith(left_out)} for line in lines]
    path.write_text(
        "".join(
            json.dumps(line | ({"reward/length/mean": 0.1 * line["step"]} if drawn else {})) + "\n"
            for line in kept
        )
    )
    seen = probe(page("demo", frozen(RunContent(folder))), HELPERS + _REWARD, tmp_path)
    assert seen["hidden"] is not drawn
    assert ("length" in seen["keys"]) is drawn


def test_a_large_fleet_scrolls_below_its_counts_with_those_in_trouble_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_steps=2)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    member = next(event for event in events if event["event"] == "member")
    states = {11: "suspect", 40: "lost"}
    with (folder / "events.jsonl").open("a") as file:
        for number in range(64):
            state = states.get(number, "serving")
            file.write(json.dumps(member | {"member": f"rollout-{number}", "what": f"state:{state}"}) + "\n")
    seen = probe(page("demo", frozen(RunContent(folder))), HELPERS + _FLEET, tmp_path)
    assert seen["names"][:4] == ["rollout-40", "rollout-11", "learner-0", "rollout-0"]
    assert len(seen["names"]) > 64
    assert "rollout: 62 serving, 1 suspect, 1 lost" in seen["counts"]
    assert seen["height"] < 400


@pytest.mark.parametrize("width", [390, 1280])
def test_what_is_written_at_an_axis_and_in_a_field_is_whole(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "demo", num_steps=2)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    entropies = {0: 0.001, 1: 0.001, 2: 0.0011}
    path.write_text(
        "".join(json.dumps({**line, "actor/entropy": entropies[line["step"]]}) + "\n" for line in lines)
    )
    seen = probe(page("demo", frozen(RunContent(folder))), HELPERS + _LABELS, tmp_path, width=width)
    assert {"0.00105", "0 s"} <= set(seen["all"])
    assert (seen["cut"], seen["inputs"]) == ([], [])


def test_it_fits_a_phone(text: str, tmp_path: Path) -> None:
    seen = probe(text, HELPERS + _PHONE, tmp_path, width=390)
    assert (seen["wide"], seen["page"] <= 0) == ([], True)
    assert seen["smallest"] >= 11


async def test_a_served_run_is_drawn_after_an_answer_that_failed(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "demo", num_steps=20)
    failures = ["once"]

    class Unsteady(ServedRuns):
        def by_name(self) -> Mapping[str, ServedRun]:
            if failures:
                raise OSError(failures.pop())
            return super().by_name()

    app = PageApp(Unsteady(tmp_path / "runs" / "demo", asyncio.get_running_loop()), "t")
    server = open_server(app, Listen(host="127.0.0.1", port=0, prefix="--"))
    text = await asyncio.to_thread(dom, f"http://127.0.0.1:{server.server_port}/t/", tmp_path)
    server.close()
    assert not failures
    assert "<h1>demo</h1>" in text
    assert text.count('<path class="line') > 15
    assert "0.310 → 0.920" in text
    assert "rollout-0" in text.partition('id="fleet"')[2]
