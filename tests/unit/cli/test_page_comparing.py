"""The page in a browser: what helps to compare runs, steps and the samples of a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from paceline.show.metrics import TRAIN_REWARD, before_and_after
from paceline.show.report.content import RunContent
from paceline.show.report.page import page
from paceline.show.report.write import frozen
from support.browser import HELPERS, needs_chromium, probe
from support.synthetic_run import write_run

pytestmark = needs_chromium

Line = dict[str, Any]


def frozen_run(folder: Path, num_steps: int, change: Callable[[Line], Line] = lambda line: line) -> Line:
    """The data of a run whose lines of metrics were changed."""
    write_run(folder, num_steps=num_steps)
    path = folder / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return frozen(RunContent(folder))


def test_a_component_that_is_the_reward_has_no_line_and_what_never_moves_no_chart(tmp_path: Path) -> None:
    def change(line: Line) -> Line:
        if TRAIN_REWARD in line:
            line |= {"reward/gsm8k/mean": line[TRAIN_REWARD], "reward/brevity/mean": line[TRAIN_REWARD] / 2}
        return line | {"actor/lr": 1e-6, "algorithm/kl_coef": 0.01}

    script = """
    async function probe() {
      await wait(300);
      const title = figure => figure.querySelector("figcaption b").textContent;
      const shown = () => all("figure").filter(f => !f.hidden).map(title);
      const words = all("p.none").map(p => p.textContent).find(text => text.startsWith("Never"));
      const before = shown();
      all("p.none button").find(b => b.textContent === "Learning rate").click();
      set("input[type=range]", "0.9");
      return {keys: all(".key", figure("Reward")).map(key => key.textContent), words, before, after: shown(),
        longest: paths("Response length").length, mean: paths("Entropy").length};
    }
    """
    seen = probe(page("demo", frozen_run(tmp_path / "demo", 20, change)), HELPERS + script, tmp_path)
    assert "brevity" in seen["keys"]
    assert "gsm8k" not in seen["keys"]
    assert seen["words"] == "Never changed: KL coefficient 0.01, Cut responses 0.01, Learning rate 1e-6"
    assert not {"KL coefficient", "Learning rate"} & set(seen["before"])
    assert "Learning rate" in seen["after"]
    # Of the response's length the mean is smoothed over its own line, the longest is not.
    assert (seen["longest"], seen["mean"]) == (3, 2)


def test_runs_are_sorted_and_found_and_their_lines_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    data = frozen_run(folder, 20, lambda line: line | {"time": 1_700_000_000.0 + 60 * line["step"]})
    (folder / "note.txt").write_text("the long one\nmore of it\n")
    head = RunContent(folder).head()
    other = {**head, "name": "b", "note": "", "seconds": 60.0, "began": 1_800_000_000.0}
    data["runs"] = [head, other]
    script = """
    async function probe() {
      location.hash = "a,b";
      await wait(400);
      const names = () => all("#runs tbody tr").map(row => row.querySelector("a").textContent);
      const sort = title => document.querySelector(`button[aria-label="sort by ${title}"]`).click();
      const cells = all("td", document.querySelector("#runs tbody tr"));
      const seen = {given: names(), row: cells.map(cell => cell.textContent),
        sparks: all("#runs polyline").length};
      sort("for"); seen.longest = names(); sort("for"); seen.shortest = names();
      set("input[aria-label='search runs']", "long one"); seen.found = names();
      seen.dashes = all("#runs ~ div .key line").map(line => line.getAttribute("stroke-dasharray"));
      return seen;
    }
    """
    seen = probe(page("runs", data), HELPERS + script, tmp_path)
    assert seen["given"] == ["a", "b"]
    assert seen["row"][1].startswith("2023-11-1")
    assert seen["row"][2:4] == ["20 min", "20 / 60"]
    assert seen["row"][-1].startswith("the long one")
    assert seen["sparks"] == 2
    assert (seen["longest"], seen["shortest"], seen["found"]) == (["a", "b"], ["b", "a"], ["a"])
    assert {"none", "5 3"} <= set(seen["dashes"])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("samples")
    data = frozen_run(folder / "demo", 4)
    table = pyarrow.parquet.read_table(folder / "demo" / "trajectories" / "val_000004.parquet").to_pylist()
    for step, words in ((0, "it is 5 or so"), (4, "it is surely 5")):
        rows = [{**row, "response": words} for row in table]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), folder / "demo" / "trajectories" / f"val_{step:06d}.parquet"
        )
    content = RunContent(folder / "demo")
    data["samples"] |= {name: content.samples.rows(name) for name in ("val_000000", "val_000004")}
    row = data["samples"]["step_000004"][5]
    script = f"""
    async function probe() {{
      location.hash = "demo?step_000004/{row["row"]}";
      await wait(500);
      const facts = () => all("#samples .facts span").map(span => span.textContent);
      const seen = {{one: facts()}};
      all("#samples .none button")[0].click();
      set("select[aria-label=order]", "by prompt");
      seen.groups = all("#samples h3").map(head => head.textContent);
      seen.beside = facts();
      seen.bars = all(".bar").map(bar => bar.getAttribute("aria-label"));
      all(".bar").at(-1).click();
      seen.best = [...new Set(all("#samples .facts b").map(b => b.textContent))];
      all("#samples select")[0].value = "val_000004";
      all("#samples select")[0].dispatchEvent(new Event("change"));
      await wait(200);
      set("input[aria-label='least reward']", "");
      all("#samples article button").find(b => b.textContent === "over the steps").click();
      await wait(200);
      seen.versions = all(".version i").map(head => head.textContent);
      seen.added = all(".version ins").map(word => word.textContent);
      seen.lost = all(".version del").map(word => word.textContent);
      return seen;
    }}
    """
    return row, content.samples.rows("step_000004"), probe(page("demo", data), HELPERS + script, folder)


def test_an_address_names_a_sample(samples: Any) -> None:
    row, _, seen = samples
    assert len(seen["one"]) == 1
    assert f"prompt {row['prompt_id']}, sample {row['sample_index']} ·" in seen["one"][0]


def test_the_samples_of_a_prompt_are_a_group(samples: Any) -> None:
    row, rows, seen = samples
    group = row["group"]
    rewards = [other["reward"] for other in rows if other["prompt_id"] == row["prompt_id"]]
    assert (group["count"], group["mean"]) == (len(rewards), sum(rewards) / len(rewards))
    assert len(rewards) == 4
    head = next(head for head in seen["groups"] if head.startswith(f"prompt {row['prompt_id']}:"))
    assert f"4 samples, reward {group['mean']:g} on average" in head
    apart = row["reward"] - group["mean"]
    words = f"{'−' if apart < 0 else '+'}{abs(apart):g} beside its group · prompt {row['prompt_id']}, "
    assert any(facts.startswith(words) for facts in seen["beside"])


def test_a_bar_of_the_histogram_chooses_its_rewards(samples: Any) -> None:
    _, _, seen = samples
    counts = [int(label.split()[0]) for label in seen["bars"]]
    assert sum(counts) == 60
    assert counts[0] + counts[-1] == 60, "the rewards are 0 and 1"
    assert seen["best"] == ["1"]


def test_an_answer_over_the_steps_shows_what_changed(samples: Any) -> None:
    _, _, seen = samples
    assert [head.split(":")[0] for head in seen["versions"]] == ["after step 0", "after step 4"]
    assert "".join(seen["added"]).split() == ["surely"]
    assert "".join(seen["lost"]).split() == ["or", "so"]


def test_the_training_reward_is_compared_as_means() -> None:
    values = [float(number) for number in range(12)]
    assert before_and_after(TRAIN_REWARD, values) == (2.0, 9.0, 5)
    assert before_and_after("val/reward/mean", values) == (0.0, 11.0, 1)
    assert before_and_after(TRAIN_REWARD, [0.5]) == (0.5, 0.5, 1)
