"""Dataflows of a user's own, against fake services: what they ask for, what they train, what is refused."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Order
from paceline.controller.batch.inputs import Inputs
from paceline.controller.run.dataflow.dataflow import load_dataflow
from paceline.controller.run.dataflow.rehearsal import rehearse
from paceline.controller.verify.check import verify
from paceline.core.errors import ConfigError, DataError, DeadlineError, LostDataError
from paceline.core.ids import sample_seed
from paceline.data.cursor import PromptCursor
from paceline.data.mixture import PromptMixture
from support.fake_fleet import FakeServices
from support.killed_sequencer import TRANSPORT, kills, live
from support.killed_sequencer import breaches_of as breaches
from support.killed_sequencer import journal_events as events
from support.killed_sequencer import metrics_lines as lines
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, prompts, run_of
from support.training_run import assert_same_metrics

REVISE = """
    async def flow(step):
        drafts = await step.sample(step.draw(), "draft")
        replies = [step.reply(group[0], "Again, please.") for group in drafts.groups]
        revised = await step.sample(replies, step.ask("revise", 3))
        better = [s.with_reward(2 * s.reward).with_baseline(0.5) for s in revised]
        step.note("revised", len(revised))
        await step.train([*better, *drafts])
        await step.publish()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's end is an exception here, which loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def settings(folder: Path, source: str, **changes: Any) -> Any:
    """A configuration with a dataflow in a file of its own."""
    file = folder / "flow.py"
    file.write_text(textwrap.dedent(source))
    fields: dict[str, Any] = {
        "trainer__dataflow": f"{file}:flow",
        "data__max_prompt_length": 256,
        "actor__ppo_max_token_len_per_gpu": 4096,
    }
    return config(**{**fields, **changes})


def score(group: Any, index: int) -> dict[str, Any]:
    """Prompts 1 and 4 fail in a draft; revisions are worth ten more."""
    bad = group.purpose == "draft" and group.prompt_id in (1, 4) and index == 0
    reward = index + (10.0 if group.purpose == "revise" else 0.0)
    return {
        "reward": None if bad else reward,
        "reward_error": ("raised", "boom") if bad else None,
        "components": {} if bad else {"exact_match": reward},
    }


async def carry_out(
    cfg: Any, folder: Path, fakes: FakeServices | None = None, broker: MemoryBroker | None = None
) -> SequencerRun:
    async with run_of(cfg, folder, fakes, broker) as it:
        it.services.writes = True
        await it.enlist_all()
        await it.go(score)
    return it


async def test_a_second_sampling_sees_the_first_and_both_are_trained(tmp_path: Path) -> None:
    cfg = settings(tmp_path, REVISE, reward__max_dropped_share=0.9)
    seen: dict[str, list[Any]] = {"draft": [], "revise": []}

    def watching(group: Any, index: int) -> dict[str, Any]:
        if index == 0 and group.step == 1:
            seen.setdefault(str(group.purpose), []).append(group)
        return score(group, index)

    async with run_of(cfg, tmp_path) as it:
        it.services.writes = True
        await it.enlist_all()
        await it.go(watching)
    drawn = sorted(PromptCursor(range(7), seed=0).take(3))
    assert sorted(group.prompt_id for group in seen["draft"]) == drawn
    kept = [i for i in drawn if i not in (1, 4)]
    assert sorted(group.prompt_id for group in seen["revise"]) == list(range(7, 7 + len(kept)))
    for group in seen["revise"]:
        text = bytes(group.prompt_token_ids.tolist()).decode()
        assert text == f"sample 0 of {kept[group.prompt_id - 7]}Again, please."
        assert group.context.ground_truth == str(kept[group.prompt_id - 7])
        assert group.seeds == tuple(
            sample_seed(run_seed=0, step=1, prompt_id=group.prompt_id, sample_index=i, purpose="revise")
            for i in range(3)
        )
        plain = sample_seed(run_seed=0, step=1, prompt_id=group.prompt_id, sample_index=0)
        assert group.seeds[0] != plain
    order = it.services.orders[0]
    assert [(str(row.trajectory_id), row.reward, row.greedy_score) for row in order.rows] == [
        *((f"draft:1:{i}:{j}", float(j), None) for i in kept for j in range(2)),
        *((f"revise:1:{7 + i}:{j}", 20.0 + 2 * j, 0.5) for i in range(len(kept)) for j in range(3)),
    ]
    line = it.lines()[1]
    assert line["dataflow/revised"] == 3 * len(kept)
    assert line["barrier/admitted"] == 5 * len(kept) + (3 - len(kept))
    assert line["barrier/groups_dropped"] == 3 - len(kept)
    assert line["reward/max"] == 24.0
    table = pyarrow.parquet.read_table(tmp_path / "trajectories/step_000001.parquet").to_pylist()
    assert [row["purpose"] for row in table] == ["draft"] * 2 * len(kept) + ["revise"] * 3 * len(kept)
    assert table[-1]["prompt"] == f"sample 0 of {kept[-1]}Again, please."
    assert breaches(tmp_path, cfg) == []
    findings = verify(tmp_path)
    given = findings.unseen["the rewards that dataflows gave instead of scorers"]
    assert given == sum(e["num_rows"] for e in it.events() if e["event"] == "batch") * 3 // 5
    assert findings.counts["digests of trajectories recomputed"] > 0


def writing() -> FakeServices:
    fakes = FakeServices()
    fakes.writes = True
    return fakes


async def test_a_dataflow_killed_at_any_event_goes_on(tmp_path: Path) -> None:
    cfg = settings(tmp_path, REVISE, reward__max_dropped_share=0.9, trainer__test_freq=2)
    calm = tmp_path / "calm"
    calm.mkdir()
    undisturbed = writing()
    assert await live(cfg, calm, undisturbed, MemoryBroker(), score)
    recorded = events(calm)
    assert [event["event"] for event in recorded].count("sampling") == 2
    for written in (True, False):
        for number in kills(recorded, written=written):
            folder, fakes, broker = tmp_path / f"{number}", writing(), MemoryBroker()
            folder.mkdir()
            assert not await live(cfg, folder, fakes, broker, score, (number, written)), number
            assert await live(cfg, folder, fakes, broker, score), number
            what = f"killed at {number}: {recorded[number]}"
            assert fakes.trained == undisturbed.trained, what
            assert_same_metrics(lines(folder), lines(calm), without=TRANSPORT)
            assert breaches(folder, cfg) == [], what


async def test_remax_as_a_dataflow_is_the_built_in_to_the_bit(tmp_path: Path) -> None:
    source = """
        async def flow(step):
            asks = step.ask("train"), step.ask("greedy", 1, temperature=0.0)
            answers = await step.sample(step.draw(), *asks)
            await step.train(answers.against("greedy"))
            await step.publish()
    """
    remax: dict[str, Any] = {"algorithm__adv_estimator": "remax", "reward__max_dropped_share": 0.9}
    runs = []
    for name, cfg in (("own", settings(tmp_path, source, **remax)), ("built-in", config(**remax))):
        (tmp_path / name).mkdir()
        fakes = writing()
        assert await live(cfg, tmp_path / name, fakes, MemoryBroker(), score)
        runs.append((fakes, tmp_path / name))
    (own, own_dir), (built_in, built_in_dir) = runs
    assert own.trained == built_in.trained
    assert own.orders == built_in.orders
    assert own.orders[0].rows[0].num_greedy_tokens == 2
    assert_same_metrics(lines(own_dir), lines(built_in_dir))
    ordered = [sorted(kinds_and_content(folder), key=str) for folder in (own_dir, built_in_dir)]
    assert ordered[0] == ordered[1]


def kinds_and_content(folder: Path) -> list[dict[str, Any]]:
    """The journal without what differs between two runs in any case."""
    volatile = {"n", "time", "pid", "metrics", "manifest", "log_position", "guard", "folder", "digest"}
    kept = [e for e in events(folder) if e["event"] not in ("run", "member", "epoch")]
    return [{k: v for k, v in event.items() if k not in volatile} for event in kept]


FAULTY = {
    "no publish": ("await step.train(await step.sample(step.draw()))", ConfigError, "without publish()"),
    "no train": (
        "await step.sample(step.draw())\n    await step.publish()",
        ConfigError,
        "publishes what was not trained",
    ),
    "no draw": ("await step.sample([])\n    await step.train([])", DataError, "trains no sample"),
    "two draws": ("step.draw()\n    step.draw()", ConfigError, "draws prompts twice"),
    "nothing asked": ("await step.sample(step.draw(), step.ask(n=0))", ConfigError, "asks for 0 samples"),
    "a bad name": ("await step.sample(step.draw(), 'Draft!')", ConfigError, "a purpose is named 'Draft!'"),
    "a validation": (
        "await step.sample(step.draw(), 'validate')",
        ConfigError,
        "leave the purpose `validate` to validations",
    ),
    "twice the same": (
        "drawn = step.draw()\n    await step.sample(drawn)\n    await step.sample(drawn)",
        ConfigError,
        "twice for 'train'",
    ),
    "a sample twice": (
        "s = await step.sample(step.draw())\n    await step.train([*s, s[0]])",
        ConfigError,
        "twice; each sample is trained once",
    ),
    "a greedy sample": (
        "await step.train(await step.sample(step.draw(), step.ask('greedy', 1)))",
        ConfigError,
        "are never trained",
    ),
    "no number": (
        "s = await step.sample(step.draw())\n    await step.train([s[0].with_reward(float('nan'))])",
        ConfigError,
        "give finite ones",
    ),
    "trains twice": (
        "s = await step.sample(step.draw())\n    await step.train(s)\n    await step.train(s)",
        ConfigError,
        "trains twice",
    ),
    "an error of its own": ("step.draw()[99]", ConfigError, "raised IndexError in step 1.*flow.py, line 2"),
    "two at once": (
        "import asyncio as a\n    p = step.draw()\n    await a.gather(step.sample(p), step.sample(p, 'x'))",
        ConfigError,
        r"calls sample\(\) while sample\(\) is under way",
    ),
    "swallowed at the end": (
        "step.draw()\n    try: step.draw()\n    except Exception: pass",
        ConfigError,
        "draws prompts twice",
    ),
    "swallowed": (
        "step.draw()\n    try: step.draw()\n    except Exception: pass\n    await step.sample([])",
        ConfigError,
        "draws prompts twice",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_what_a_dataflow_may_not_do_ends_the_run_with_the_reason(fault: str, tmp_path: Path) -> None:
    body, kind, message = FAULTY[fault]
    cfg = settings(tmp_path, f"async def flow(step):\n    {body}\n")
    with pytest.raises(kind, match=message):
        await carry_out(cfg, tmp_path)


async def test_a_dataflow_that_waits_too_long_ends_the_run(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def flow(step):
            await step.sample(step.draw())
            await asyncio.sleep(3600)
    """
    cfg = settings(tmp_path, source, barrier__collect_timeout_s=0.3)
    with pytest.raises(DeadlineError, match="no answer from the dataflow within 0.3 s"):
        await carry_out(cfg, tmp_path)


async def test_a_dataflow_that_asks_for_something_else_after_a_kill_is_ended(tmp_path: Path) -> None:
    cfg = settings(tmp_path, REVISE, reward__max_dropped_share=0.9)
    fakes, broker = writing(), MemoryBroker()
    (tmp_path / "calm").mkdir()
    assert await live(cfg, tmp_path / "calm", writing(), MemoryBroker(), score)
    at = next(e["n"] for e in events(tmp_path / "calm") if e["event"] == "batch")
    folder = tmp_path / "killed"
    folder.mkdir()
    assert not await live(cfg, folder, fakes, broker, score, (at, True))
    changed = settings(tmp_path, REVISE.replace("Again", "Another"), reward__max_dropped_share=0.9)
    with pytest.raises(ConfigError, match="step 1 continues, but its sampling 2 asks for something else"):
        await live(changed, folder, fakes, broker, score)
    settings(tmp_path, REVISE)
    assert await live(cfg, folder, fakes, broker, score)
    assert breaches(folder, cfg) == []


async def test_a_first_sampling_for_something_else_after_a_kill_is_ended(tmp_path: Path) -> None:
    cfg, fakes, broker = settings(tmp_path, REVISE, reward__max_dropped_share=0.9), writing(), MemoryBroker()
    (tmp_path / "calm").mkdir()
    assert await live(cfg, tmp_path / "calm", writing(), MemoryBroker(), score)
    at = next(e["n"] for e in events(tmp_path / "calm") if e["event"] == "dispatch")
    folder = tmp_path / "killed"
    folder.mkdir()
    assert not await live(cfg, folder, fakes, broker, score, (at, True))
    changed = settings(tmp_path, REVISE.replace('"draft"', '"sketch"'))
    with pytest.raises(ConfigError, match="step 1 continues, but its sampling 1 asks for something else"):
        await live(changed, folder, fakes, broker, score)


async def test_samples_that_are_drawn_anew_may_lead_to_other_prompts(tmp_path: Path) -> None:
    """The broker loses the step in its second sampling, and the first one's rewards are others after that."""
    source = """
        async def flow(step):
            drafts = await step.sample(step.draw(), "draft")
            best = [max(group, key=lambda sample: sample.reward) for group in drafts.groups]
            revised = await step.sample([step.reply(sample, "Again.") for sample in best], "revise")
            await step.train(revised)
            await step.publish()
    """
    cfg, lost = settings(tmp_path, source, trainer__total_steps=1), list[str]()

    def other_after_loss(group: Any, index: int) -> dict[str, Any]:
        reward = float(-index if lost else index)
        return {"reward": reward, "reward_error": None, "components": {"exact_match": reward}}

    async with run_of(cfg, tmp_path) as it:
        collect = it.sequencer._collector.collect

        async def losing(order: Order, *arguments: Any, **options: Any) -> Batch:
            if order.asks[0].purpose == "revise" and not lost:
                lost.append("all")
                raise LostDataError("the broker was emptied")
            return await collect(order, *arguments, **options)

        it.sequencer._collector.collect = losing  # type: ignore[method-assign]
        it.services.writes = True
        await it.enlist_all()
        await it.go(other_after_loss)
    asked = [e["digest"] for e in it.events() if e["event"] == "sampling"]
    assert len(asked) == len(set(asked)) == 2
    assert breaches(tmp_path, cfg) == []


def test_texts_are_kept_for_a_dataflow(tmp_path: Path) -> None:
    assert not config(trainer__save_trajectories=False).keeps_texts
    assert settings(tmp_path, REVISE, trainer__save_trajectories=False).keeps_texts


async def test_a_prompt_that_is_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    cfg = settings(tmp_path, REVISE.replace("Again, please.", "x" * 300), trainer__total_steps=1)
    it = await carry_out(cfg, tmp_path)
    assert {row.trajectory_id.purpose for row in it.services.orders[0].rows} == {"draft"}
    assert (it.lines()[1]["dataflow/prompts_too_long"], it.lines()[1]["dataflow/revised"]) == (2, 0)
    assert breaches(tmp_path, cfg) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def flow(step): ...", "is no dataflow; write `async def flow"),
        ("async def flow(): ...", "is no dataflow; write `async def flow"),
        ("async def other(step): ...", "has no 'flow'"),
    ],
)
def test_what_is_no_dataflow_is_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_dataflow(settings(tmp_path, source))


def test_it_does_not_go_with_work_ahead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which samples it trains on"):
        settings(tmp_path, REVISE, barrier__work_ahead="scores", actor__use_kl_loss=True)
    with pytest.raises(ConfigError, match="write path/to/file.py:function"):
        config(trainer__dataflow="flow.py")


def inputs() -> Inputs:
    """Seven prompts, drawn three at a time."""
    train = prompts(7)
    return Inputs(
        train=train,
        val=(),
        cursor=PromptMixture({"": train.ids()}, batch_size=3, seed=0),
        stop_token_ids=(0,),
        encode=lambda value: [*str(value).encode()],
    )


async def test_a_dataflow_is_rehearsed_before_the_run(tmp_path: Path) -> None:
    cfg, own = settings(tmp_path, REVISE), inputs()
    before = own.cursor.state
    said = await rehearse(load_dataflow(cfg), cfg, own)
    assert (
        said == f"{cfg.trainer.dataflow}, which sampled 6 for draft, then 9 for revise and trained 15 of them"
    )
    assert own.cursor.state == before


CHANGING = {
    "asks": ('[step.reply(s, str(next(numbers))) for s in drafts], "revise"', "asks for something else"),
    "trains": ('[step.reply(s, "no") for s in drafts], "revise"', "trained something else"),
}


@pytest.mark.parametrize("what", CHANGING)
async def test_a_dataflow_that_does_something_else_the_second_time_is_refused(
    what: str, tmp_path: Path
) -> None:
    asked, message = CHANGING[what]
    source = f"""
        import itertools
        numbers = itertools.count()
        async def flow(step):
            drafts = await step.sample(step.draw(), "draft")
            revised = await step.sample({asked})
            await step.train([s.with_reward(next(numbers)) for s in revised])
            await step.publish()
    """
    cfg = settings(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        await rehearse(load_dataflow(cfg), cfg, inputs())
