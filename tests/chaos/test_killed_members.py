"""Rollout and reward members are killed at any moment while a step is collected: the batch stays the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.controller.batch.barrier import Verdict
from paceline.service.observability import metrics, telemetry
from support.fake_engine import FakeEngine
from support.killed_fleet import NUM_SAMPLES, PROMPTS, MortalBroker, collect, content, reward, roll_out


@pytest.mark.parametrize("seed", range(12))
async def test_the_batch_does_not_depend_on_who_dies(seed: int, tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "wild").mkdir()
    calm, calm_broker, _ = await collect(tmp_path / "calm", seed=seed, num_deaths=0)
    wild, wild_broker, fleet = await collect(tmp_path / "wild", seed=seed, num_deaths=3)

    assert len(fleet.deaths) >= 3, "nobody was killed: the test shows nothing"
    assert await content(wild, wild_broker) == await content(calm, calm_broker)
    assert calm.verdicts == {Verdict.ADMITTED: len(PROMPTS) * NUM_SAMPLES}
    assert set(wild.verdicts) <= {Verdict.ADMITTED, Verdict.DUPLICATE}
    assert wild.verdicts[Verdict.ADMITTED] == len(PROMPTS) * NUM_SAMPLES
    with (tmp_path / "wild/events.jsonl").open() as lines:
        admitted = [e["id"] for e in map(json.loads, lines) if e.get("verdict") == "admitted"]
    assert len(admitted) == len(set(admitted)) == len(PROMPTS) * NUM_SAMPLES


@pytest.mark.parametrize("seed", range(12))
async def test_what_takes_the_places_of_equal_groups_does_not_depend_on_who_dies(
    seed: int, tmp_path: Path
) -> None:
    outcomes = []
    for name, num_deaths in (("calm", 0), ("wild", 3)):
        (tmp_path / name).mkdir()
        batch, broker, fleet = await collect(tmp_path / name, seed=seed, num_deaths=num_deaths, num_first=6)
        greedy = {i: header.reward for i, header in batch.greedy.items()}
        aside = [str(header.trajectory_id) for header in batch.set_aside]
        outcomes.append((await content(batch, broker), aside, greedy, batch.num_extra))
    assert len(fleet.deaths) >= 3, "nobody was killed: the test shows nothing"
    calm, wild = outcomes
    assert wild == calm
    rows, aside, greedy, num_extra = calm
    assert num_extra
    assert len(rows) <= 6 * NUM_SAMPLES
    assert len(greedy) == 6 + num_extra == (len(rows) + len(aside)) // NUM_SAMPLES


@pytest.mark.parametrize("seed", range(6))
async def test_members_that_die_at_any_call_leave_their_half_drawn_samples_to_others(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server saves after almost every token: it dies at saves, too, before and after they take effect."""
    num_carried = 0

    def count(metric: metrics.Metric, amount: float = 1, **_: str) -> None:
        nonlocal num_carried
        num_carried += int(amount) if metric is metrics.TOKENS_CARRIED_OVER else 0

    async def roll_out_slowly(broker: MortalBroker, name: str) -> None:
        await roll_out(broker, name, FakeEngine(token_s=0.004), save_progress_s=0.005)

    monkeypatch.setattr(telemetry, "count", count)
    batches = []
    for name, num_deaths in (("calm", 0), ("wild", 4)):
        (tmp_path / name).mkdir()
        works = (roll_out_slowly, reward)
        batch, broker, _ = await collect(tmp_path / name, seed=seed, num_deaths=num_deaths, works=works)
        batches.append(await content(batch, broker))
        groups = [g for stream in broker._store.streams.values() for g in stream.groups.values()]
        assert not any(pending.progress for g in groups for pending in g.pending.values())
    assert batches[0] == batches[1]
    assert num_carried > 0


async def test_a_prompt_that_kills_its_servers_is_given_up_and_takes_no_other_along(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "poisoned").mkdir()
    calm, calm_broker, _ = await collect(tmp_path / "calm", seed=1, num_deaths=0)
    tokens = PROMPTS[12].token_ids.tolist()
    poisonous = [i for i, prompt in PROMPTS.items() if prompt.token_ids.tolist() == tokens]
    batch, broker, fleet = await collect(tmp_path / "poisoned", seed=1, num_deaths=0, poison=tuple(tokens))
    assert 6 <= len(fleet.deaths) <= 6 * len(poisonous)
    assert [(group.prompt_id, group.reason) for group in batch.dropped] == [
        (prompt_id, "rollout:max_deliveries") for prompt_id in poisonous
    ]
    others = [row for row in await content(calm, calm_broker) if int(row[0].split(":")[2]) not in poisonous]
    assert await content(batch, broker) == others
