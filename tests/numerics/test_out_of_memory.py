"""An update that runs out of memory: its micro-batches are halved, and nothing of the first try is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import EnvironmentLackError, NumericsError
from paceline.learner.batch.halve import Halves
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import TrainingBatch
from paceline.learner.distributed.catching_up import PassCollectives
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.memory import MemoryRoom
from paceline.learner.train.state.optimizer import OutOfMemoryError
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step
from support.learner_shapes import rows_with_holes
from support.memory_faults import GROUPS, PLACES, bits, build, one_rank_runs_out, out_of_memory

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks"), pytest.mark.timeout(900)]

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def disturbed(model: Path, ranks: Ranks) -> list[Any]:
    return one_rank_runs_out(ranks, str(model), "last layer, backwards")


def test_the_step_is_that_of_halves_wherever_memory_ran_out(disturbed: list[Any]) -> None:
    *tries, (_, _, expected, expected_bits, expected_after) = disturbed
    for _, _, metrics, own_bits, after in tries:
        assert metrics == expected
        assert own_bits == expected_bits
        assert after == expected_after


def test_a_person_is_told_and_later_steps_are_planned_smaller(
    model: Path, ranks: Ranks, disturbed: list[Any]
) -> None:
    learner = build(ranks, str(model), [])
    with out_of_memory(learner, PLACES[0], set()) as undisturbed:
        take_step(learner, 1)
    for notes, (sizes, later_sizes), metrics, _, after in disturbed:
        (note,) = notes
        assert note.startswith("guard: out of memory in the actor's update on 1 rank(s)")
        assert "1/2 of actor.ppo_max_token_len_per_gpu" in note
        assert metrics["guard/out_of_memory"] == 1
        assert "guard/out_of_memory" not in after
        # Every row passed twice in the first mini-batch, in the end in smaller parts.
        assert sum(sizes) > 32
        assert sum(later_sizes) == 32
        assert len(later_sizes) > len(undisturbed)


def test_halved_steps_are_those_of_whole_micro_batches_up_to_rounding(
    model: Path, ranks: Ranks, disturbed: list[Any]
) -> None:
    learner = build(ranks, str(model), [])
    take_step(learner, 1)
    whole_metrics = numbers(take_step(learner, 2))
    metrics = {name: value for name, value in disturbed[0][2].items() if name != "guard/out_of_memory"}
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_memory_that_stays_short_is_halved_until_single_rows_do_not_fit(model: Path, ranks: Ranks) -> None:
    notes: list[str] = []
    learner = build(ranks, str(model), notes)
    take_step(learner, 1)
    before = bits(learner)
    with (
        out_of_memory(learner, PLACES[0], set(range(1000))),
        pytest.raises(EnvironmentLackError, match="one row per micro-batch, which cannot be halved"),
    ):
        take_step(learner, 2)
    assert bits(learner) == before
    assert len(notes) >= 2
    assert "1/2 of" in notes[-1]


def test_the_critic_and_resampled_rows_are_halved_too(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.learner.train.updating.losses import ValueLoss

    config = run_config(model, algorithm={"resample": {"method": "pow"}})
    plain = numbers(take_step(Learner.build(config, ranks), 1))
    honest, calls = ValueLoss.__call__, iter(range(100))

    def short_of_memory(self: ValueLoss, *arguments: Any) -> Any:
        result = honest(self, *arguments)
        if next(calls) == 1:
            raise torch.OutOfMemoryError("made up")
        return result

    monkeypatch.setattr(ValueLoss, "__call__", short_of_memory)
    notes: list[str] = []
    metrics = numbers(take_step(Learner.build(config, ranks, notes.append), 1))
    assert "the critic's update" in notes[0]
    assert metrics.pop("guard/out_of_memory") == 1
    assert metrics == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_a_rank_that_shares_rows_ends_where_not_even_its_exchanges_have_room(
    model: Path, ranks: Ranks
) -> None:
    learner = build(replace(ranks, context=ranks.world), str(model), [])
    counted = PassCollectives(learner.actor.network, has_replicas=False)
    learner.actor = replace(learner.actor, collectives=counted)
    words = "again without this rank's tokens.* Lower the token budget .* or raise learner.context_parallel"
    with out_of_memory(learner, PLACES[0], {0, 1}), pytest.raises(EnvironmentLackError, match=words):
        take_step(learner, 1)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_halves_by_hand(share_prompts: bool) -> None:
    rows = rows_with_holes([[(3, 2), (3, 4)], [(2, 2), (2, 9)]])
    batch = pack(rows, torch.device("cpu"), share_prompts=share_prompts)
    # Row 3 was drawn twice, row 0 not at all.
    batch = batch.with_rows(torch.tensor([1, 2, 3, 3]))
    table = torch.arange(36.0).reshape(4, 9)
    part = TrainingBatch(
        batch=batch,
        log_probs={"rollout": table + 500, "reference": table + 200, "teacher": table + 600},
        values=table,
        scores=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        group_ids=torch.tensor([70, 71, 72, 73]),
        advantages=table + 100,
        returns=table + 300,
        weights=table + 400,
        selected=table > 20,
    )
    # 7 + 4 + 11 tokens, half of which are in rows 1 and 2.
    halves = Halves.of(part)
    first, second = halves.halves
    assert (first.batch.rows, second.batch.rows) == ((1, 2), (3, 3))
    assert [source.index for source in second.batch.sources] == [3]
    assert first.values is not None
    assert first.values.tolist() == [[0, 1, 2, 3], [9, 10, 11, 12]]
    assert first.log_probs.keys() == second.log_probs.keys() == {"rollout", "reference", "teacher"}
    names = ("values", "advantages", "reference", "returns", "weights", "rollout", "teacher")
    for number, name in enumerate(names):
        for half, own in ((first, table[:2, :4]), (second, table[2:])):
            kept = half.log_probs[name] if name in half.log_probs else getattr(half, name)
            assert kept.tolist() == (own + 100 * number).tolist(), name
    assert (first.scores.tolist(), second.scores.tolist()) == ([1, 2], [3, 4])
    assert (first.group_ids.tolist(), second.group_ids.tolist()) == ([70, 71], [72, 73])
    assert second.group_ids.dtype == torch.int64
    assert first.selected is not None
    assert second.selected is not None
    assert (first.selected.any(), second.selected.sum()) == (False, 15)
    assert torch.equal(second.batch.mask, batch.mask[2:])
    for half, value in ((first, -1.0), (second, -2.0)):
        half.log_probs["old"] = torch.full(half.batch.mask.shape, value)
    halves.hand_back()
    assert part.log_probs["old"][:, 0].tolist() == [-1, -1, -2, -2]
    alone, filler = Halves.of(second).halves
    assert (alone.batch.rows, filler.batch.rows) == ((3, 3), ())
    assert filler.advantages.tolist() == [[0.0]]
    assert filler.scores.tolist() == [0.0]
    assert filler.log_probs == dict.fromkeys(("rollout", "reference", "teacher", "old"), torch.zeros(1, 1))
    assert not filler.batch.mask.any()


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("reference log-probs", {"actor": {"use_kl_loss": True}}),
        ("weights", {"algorithm": {**GROUPS, "rollout_correction": {"method": "tis"}}}),
    ],
)
def test_a_table_that_a_half_has_lost_is_an_error_and_no_smaller_loss(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, sections: dict[str, Any]
) -> None:
    sections = {"algorithm": GROUPS, **sections}
    actor = {"ppo_max_token_len_per_gpu": 96, "shared_prompts": "off", **sections.pop("actor", {})}
    learner = Learner.build(run_config(model, actor=actor, **sections), ranks, [].append)
    honest = Halves.of

    def without(half: TrainingBatch) -> TrainingBatch:
        if name == "weights":
            return replace(half, weights=None)
        log_probs = {of: table for of, table in half.log_probs.items() if of != "reference"}
        return replace(half, log_probs=log_probs)

    def losing(part: TrainingBatch) -> Halves:
        halves = honest(part)
        first, second = halves.halves
        return replace(halves, halves=(without(first), without(second)))

    monkeypatch.setattr(Halves, "of", losing)
    with (
        out_of_memory(learner, PLACES[0], {0}),
        pytest.raises(NumericsError, match=f"has no {name}, which the policy loss reads"),
    ):
        take_step(learner, 1)


def part_of(*lengths: int) -> TrainingBatch:
    """A part of rows without a prompt in common, with these responses."""
    batch = pack(rows_with_holes([[(2, length)] for length in lengths]), torch.device("cpu"))
    table = torch.zeros(batch.mask.shape)
    return TrainingBatch(
        batch=batch,
        log_probs={"old": table},
        values=None,
        scores=torch.zeros(len(lengths)),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        advantages=table,
        returns=None,
        weights=None,
    )


def take(room: MemoryRoom, ranks: Ranks, parts: list[TrainingBatch], num_failures: int) -> list[int]:
    """Takes a step that runs out of memory so often; the rows of its parts in the end."""
    failures = iter(range(num_failures))

    def act(parts: Any) -> list[int]:
        if next(failures, None) is not None:
            raise OutOfMemoryError("PolicyNetwork", 1)
        return [len(part.batch.sources) for part in parts]

    return room.take(parts, act, ranks=ranks, network="actor")


def test_a_part_of_one_row_beside_a_larger_one_is_no_reason_to_give_up(ranks: Ranks) -> None:
    assert take(MemoryRoom([].append), ranks, [part_of(4, 4, 4, 4), part_of(3)], 1) == [2, 2, 1, 0]


def test_log_probs_of_a_pass_whose_step_was_not_taken_are_forgotten(ranks: Ranks) -> None:
    """Halves compute them again: else the ratio of the step that is taken would not be exactly 1."""
    known, unknown = part_of(4, 4), part_of(4, 4)
    del unknown.log_probs["old"]
    seen = []

    def act(parts: Any) -> None:
        seen.append(["old" in part.log_probs for part in parts])
        for part in parts:
            part.log_probs.setdefault("old", torch.full(part.batch.mask.shape, float(len(seen))))
        if len(seen) < 2:
            raise OutOfMemoryError("PolicyNetwork", 1)

    MemoryRoom([].append).take([known, unknown], act, ranks=ranks, network="actor")
    assert seen == [[True, False], [True, True, False, False]]
    assert known.log_probs["old"].tolist() == [[0.0] * 4] * 2
    assert unknown.log_probs["old"].tolist() == [[2.0] * 4] * 2


def test_each_step_halves_the_budget_of_later_steps_once_however_often_its_parts_were_halved(
    ranks: Ranks,
) -> None:
    """Within a step the parts are halved by rows until they fit, which says little of tokens."""
    room = MemoryRoom([].append)
    assert room.budget(1000, 10) == 1000
    take(room, ranks, [part_of(*[4] * 8)], 2)
    take(room, ranks, [part_of(*[4] * 8)], 1)
    assert room.metrics == {"guard/out_of_memory": 3.0}
    assert room.budget(1000, 10) == 500
    assert room.metrics == {}
    take(room, ranks, [part_of(*[4] * 8)], 1)
    assert room.budget(1000, 10) == 250
    assert room.budget(1000, 10) == 250
    assert room.budget(200, 300) == 200


def test_the_budget_holds_the_longest_row() -> None:
    room = MemoryRoom([].append)
    assert room.budget(1000, 700) == 1000
    room._num_halvings = 1
    assert (room.budget(1000, 100), room.budget(1000, 700)) == (500, 700)
