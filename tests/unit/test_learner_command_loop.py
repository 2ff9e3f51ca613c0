"""The command loop on one rank: results, refusals, fatal errors; ranks' environment; a row's last check."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import (
    ConfigError,
    DataError,
    LostDataError,
    ModelError,
    PacelineError,
    VersionMismatchError,
)
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.training import BatchRow, TrainOrder
from paceline.learner.batch.blobs import ReplayBound, fetch_rows
from paceline.learner.commands import Commands
from paceline.learner.distributed.collectives import CommandError, broadcast_bytes, gather_bytes
from paceline.learner.distributed.command_loop import STOP, CommandLoop, CommandQueue
from paceline.learner.distributed.ranks import RankEnvironment, Ranks
from paceline.learner.train.state.schedule import Schedule
from paceline.wire import blob_digest, decode_trajectory, encode_trajectory
from support.learner_fakes import POLICY, DictBlobs, make_batch
from support.learner_ranks import alone

pytestmark = pytest.mark.torch


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with alone() as group:
        yield group


def running(
    ranks: Ranks, handlers: Mapping[str, Any]
) -> tuple[CommandQueue, threading.Thread, list[BaseException]]:
    queue, died = CommandQueue(), list[BaseException]()

    def work() -> None:
        try:
            CommandLoop(ranks, lambda: handlers, queue, keep_alive_s=0.02).run()
        except Exception as error:  # noqa: BLE001  the test looks at it
            died.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return queue, thread, died


def test_commands_run_in_order_and_refusals_do_not_end_the_group(ranks: Ranks) -> None:
    seen: list[int] = []

    def count(arguments: Mapping[str, Any]) -> int:
        seen.append(arguments["number"])
        if arguments["number"] == 2:
            raise CommandError(VersionMismatchError("not this one"))
        return sum(seen)

    queue, thread, died = running(ranks, {"count": count})
    futures = [queue.submit("count", {"number": number}) for number in (1, 2, 3)]
    assert futures[0].result(timeout=120) == 1
    with pytest.raises(VersionMismatchError, match="not this one"):
        futures[1].result(timeout=120)
    assert futures[2].result(timeout=120) == 6
    assert queue.submit(STOP, {}).result(timeout=120) is None
    thread.join(timeout=120)
    assert (seen, died) == ([1, 2, 3], [])
    with pytest.raises(PacelineError, match="the learner group has stopped"):
        queue.submit("count", {"number": 4}).result(timeout=120)


def test_any_other_error_ends_the_group_and_is_told_to_all_who_wait(ranks: Ranks) -> None:
    def explode(arguments: Mapping[str, Any]) -> None:
        raise ZeroDivisionError("by nothing")

    queue, thread, died = running(ranks, {"explode": explode})
    with pytest.raises(PacelineError, match="ZeroDivisionError: by nothing"):
        queue.submit("explode", {}).result(timeout=120)
    thread.join(timeout=120)
    assert isinstance(died[0], ZeroDivisionError)
    with pytest.raises(PacelineError, match="ZeroDivisionError: by nothing"):
        queue.submit("explode", {}).result(timeout=120)
    # The reason lies where the other ranks look for it.
    assert ranks.store.get("paceline/failure/0") == b"ZeroDivisionError: by nothing"


def test_an_error_while_loading_ends_the_group_with_its_own_words(ranks: Ranks) -> None:
    def prepare() -> Any:
        raise ModelError("no such folder")

    queue = CommandQueue()
    with pytest.raises(ModelError, match="no such folder"):
        CommandLoop(ranks, prepare, queue).run()
    with pytest.raises(ModelError, match="no such folder"):
        queue.submit("train", {}).result(timeout=120)


def test_bytes_pass_through_a_group_of_one(ranks: Ranks) -> None:
    assert broadcast_bytes(b"\x00abc", ranks) == b"\x00abc"
    assert broadcast_bytes(b"", ranks) == b""
    assert gather_bytes(b"x", ranks) == [b"x"]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_the_environment_of_a_rank() -> None:
    assert RankEnvironment.read({}).world_size == 1
    read = RankEnvironment.read(TORCHRUN)
    assert (read.rank, read.world_size, read.master_host, read.master_port) == (1, 2, "host", 29500)
    with pytest.raises(ConfigError, match="MASTER_PORT not set; start the learner with torchrun"):
        RankEnvironment.read({name: TORCHRUN[name] for name in TORCHRUN if name != "MASTER_PORT"})
    with pytest.raises(ConfigError, match=r"RANK=2 must be in 0..1"):
        RankEnvironment.read(TORCHRUN | {"RANK": "2"})
    with pytest.raises(ConfigError, match="must be numbers"):
        RankEnvironment.read(TORCHRUN | {"WORLD_SIZE": "two"})


def test_schedules_by_hand() -> None:
    constant = Schedule(peak=2.0, kind="constant", total_steps=10, warmup_ratio=0.35)
    assert [constant.at(step) for step in (1, 2, 3, 4, 5, 10)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    cosine = Schedule(peak=1.0, kind="cosine", total_steps=6, warmup_ratio=0.2, min_ratio=0.1)
    assert [cosine.at(step) for step in (1, 2, 4, 6, 9)] == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])
    assert Schedule(peak=1.0, kind="constant", total_steps=5, warmup_ratio=0.0).at(1) == 1.0
    linear = Schedule(peak=2.0, kind="linear", total_steps=6, warmup_ratio=0.3, min_ratio=0.5)
    assert [linear.at(step) for step in (1, 2, 3, 4, 6, 7)] == pytest.approx([1.0, 2.0, 1.75, 1.5, 1.0, 1.0])
    again = Schedule(peak=1.0, kind="cosine_with_restarts", total_steps=8, warmup_ratio=0.0, cycles=2)
    half = 0.5 * (1 + math.cos(math.pi / 4))
    assert [again.at(step) for step in (1, 2, 3, 4, 5, 6, 8)] == pytest.approx(
        [half, 0.5, 1 - half, 1.0, half, 0.5, 0.0]
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_restarts"])
def test_a_longer_schedule_goes_on_from_where_it_was(kind: str) -> None:
    def make(total_steps: int) -> Schedule:
        return Schedule(
            peak=1.0, kind=kind, total_steps=total_steps, warmup_ratio=0.2, min_ratio=0.1, cycles=2
        )

    first = make(20)
    assert first.at(4) == 1.0 > first.at(3), "four steps of warm-up"
    for resumed_after in range(1, 23):  # to the bit
        unbroken, same = make(23), make(23)
        same.load_state_dict(unbroken.state_dict(), step=resumed_after)
        assert [same.at(step) for step in range(1, 25)] == [unbroken.at(step) for step in range(1, 25)]
    longer = make(50)
    longer.load_state_dict(first.state_dict(), step=9)
    assert longer.at(9) == first.at(9)
    # Of 16 steps of the fall 5 are done; 41 steps are left for the 11 that were left.
    assert longer.at(9 + 41) == pytest.approx(first.at(20))
    left = [longer.at(step) for step in range(9, 51)]
    assert left == pytest.approx([first.at(9 + 11 * done / 41) for done in range(42)])
    again = make(60)
    again.load_state_dict(longer.state_dict(), step=29)
    assert again.at(29) == longer.at(29)
    assert again.at(60) == pytest.approx(first.at(20))
    finished = make(30)
    finished.load_state_dict(first.state_dict(), step=20)
    assert {finished.at(step) for step in range(21, 31)} == {first.at(20)}
    warming = make(100)
    warming.load_state_dict(first.state_dict(), step=2)
    assert [warming.at(step) for step in (2, 3, 4)] == [first.at(step) for step in (2, 3, 4)]
    assert warming.at(100) == pytest.approx(first.at(20))


def test_rows_are_fetched_by_index_and_checked_once_more() -> None:
    rows, blobs = make_batch(num_prompts=2, num_samples=2)
    store = DictBlobs(blobs)

    def fetch(batch: tuple[BatchRow, ...] = rows, policy: PolicyTag = POLICY) -> Any:
        return fetch_rows(store, batch, [2, 0], policy=policy, vocab_size=48)

    fetched = fetch()
    assert list(fetched) == [2, 0]
    assert fetched[2].index == 2
    assert len(fetched[2].response_token_ids) == rows[2].num_response_tokens
    assert fetched[2].response_log_probs.dtype == np.float32
    with pytest.raises(
        VersionMismatchError,
        match=r"train:1:1:0 was sampled from v0@0123456789abcdef, the step trains on v1@",
    ):
        fetch(policy=PolicyTag(version=1, digest=POLICY.digest))
    other = {"blob_key": rows[3].blob_key, "blob_digest": rows[3].blob_digest}
    swapped = (*rows[:2], BatchRow(**{**fields(rows[2]), **other}), rows[3])
    with pytest.raises(DataError, match=r"holds trajectory train:1:1:1, the batch names train:1:1:0"):
        fetch(swapped)
    short = (*rows[:2], BatchRow(**{**fields(rows[2]), "num_response_tokens": 99}), rows[3])
    with pytest.raises(DataError, match=r"tokens, its header says \d+ \+ 99"):
        fetch(short)
    greedy = TrajectoryId(step=1, purpose="greedy", prompt_id=1, sample_index=0)
    with pytest.raises(DataError, match=r"greedy:1:1:0 was not sampled for training"):
        fetch((*rows[:2], BatchRow(**{**fields(rows[2]), "trajectory_id": greedy}), rows[3]))
    with pytest.raises(PacelineError, match="token"):
        fetch_rows(store, rows, [2], policy=POLICY, vocab_size=3)


def test_rows_of_earlier_steps_are_fetched_within_the_bound_of_a_replay_alone() -> None:
    rows, blobs = make_batch(num_prompts=2, num_samples=2)
    store, step = DictBlobs(blobs), rows[0].trajectory_id.step
    assert POLICY.version == step - 1 == 0

    def fetch(replay: ReplayBound | None, policy: PolicyTag = POLICY) -> Any:
        return fetch_rows(store, rows, [2, 0], policy=policy, vocab_size=48, replay=replay)

    later = PolicyTag(version=3, digest="f" * 16)
    assert list(fetch(ReplayBound(step=4, oldest=0), later)) == [2, 0]
    assert list(fetch(ReplayBound(step=step, oldest=-3))) == [2, 0]
    with pytest.raises(VersionMismatchError, match=r"step 4 replays only versions 1 to 2"):
        fetch(ReplayBound(step=4, oldest=1), later)
    with pytest.raises(VersionMismatchError, match="the step trains on v3@"):
        fetch(None, later)
    with pytest.raises(VersionMismatchError, match="the step trains on v3@"):
        fetch(ReplayBound(step=step, oldest=-3), later)
    rows, blobs = make_batch(step=9, num_prompts=2, num_samples=2)
    store = DictBlobs(blobs)
    with pytest.raises(VersionMismatchError, match="step 4 replays only"):
        fetch(ReplayBound(step=4, oldest=0), later)


def test_a_sample_with_one_token_beyond_the_bound_of_a_replay_is_not_trained_again() -> None:
    rows, blobs = make_batch(num_prompts=2, num_samples=2)
    sample = decode_trajectory(blobs[rows[2].blob_key])
    newer = PolicyTag(version=2, digest="f" * 16)
    ranges = (PolicyRange(POLICY, 0, 1), PolicyRange(newer, 1, len(sample.response_token_ids)))
    blob = encode_trajectory(dataclasses.replace(sample, ranges=ranges))
    blobs[rows[2].blob_key] = blob
    changed = (*rows[:2], dataclasses.replace(rows[2], blob_digest=blob_digest(blob)))

    def fetch(oldest: int) -> Any:
        bound = ReplayBound(step=4, oldest=oldest)
        return fetch_rows(DictBlobs(blobs), changed, [2], policy=newer, vocab_size=48, replay=bound)

    assert list(fetch(POLICY.version)) == [2]
    with pytest.raises(VersionMismatchError, match="replays only versions 1 to 2"):
        fetch(POLICY.version + 1)


def test_a_blob_that_was_drawn_again_after_it_was_scored_is_not_trained_on() -> None:
    """The second sample has the same id, policy and length as the first; only the tokens differ."""
    rows, blobs = make_batch(num_prompts=2, num_samples=2)
    sample = decode_trajectory(blobs[rows[2].blob_key])
    tokens = sample.response_token_ids.copy()
    tokens[-1] = 2 if tokens[-1] != 2 else 3
    blobs[rows[2].blob_key] = encode_trajectory(dataclasses.replace(sample, response_token_ids=tokens))
    store = DictBlobs(blobs)
    assert list(fetch_rows(store, rows, [0, 1, 3], policy=POLICY, vocab_size=48)) == [0, 1, 3]
    with pytest.raises(
        LostDataError, match=r"trajectory train:1:1:0 holds another sample than the one that was scored"
    ):
        fetch_rows(store, rows, [0, 2], policy=POLICY, vocab_size=48)


@pytest.mark.parametrize(
    ("versions", "in_flight", "is_trained"),
    [
        ((2, 4), True, True),
        ((3, 4), True, True),
        ((4,), True, True),
        ((2, 5), True, False),
        ((1, 4), True, False),
        ((2, 3), False, False),
        ((3,), False, False),
    ],
)
def test_ranges_of_tokens_within_the_bound_are_trained_on(
    versions: tuple[int, ...], in_flight: bool, is_trained: bool, ranks: Ranks
) -> None:
    """A step that was dispatched for version 2, with a learner at version 4."""
    rows, blobs = make_batch(num_prompts=2, num_samples=2)
    tags = [PolicyTag(version=v, digest=f"{v:016x}") for v in versions]
    sample = decode_trajectory(blobs[rows[2].blob_key])
    ends = [*range(1, len(tags)), len(sample.response_token_ids)]
    ranges = tuple(PolicyRange(tag, *part) for tag, part in zip(tags, pairwise([0, *ends]), strict=True))
    blob = encode_trajectory(
        dataclasses.replace(sample, policy=tags[0], ranges=ranges if len(ranges) > 1 else ())
    )
    blobs[rows[2].blob_key] = blob
    changed = (*rows[:2], dataclasses.replace(rows[2], blob_digest=blob_digest(blob)), rows[3])
    due = PolicyTag(version=2, digest=f"{2:016x}")

    commands: Any = object.__new__(Commands)
    commands._blobs = DictBlobs(blobs)
    algorithm = SimpleNamespace(replay=SimpleNamespace(max_age=4), teacher=None)
    config = SimpleNamespace(pushes_in_flight=in_flight, replays=False, algorithm=algorithm)
    commands._learner = SimpleNamespace(version=4, ranks=ranks, vocab_size=48, image_spec=None, config=config)
    fetch = commands._fetch(dict(enumerate(changed)), due)
    if is_trained:
        assert list(fetch([2])) == [2]
        return
    with pytest.raises(CommandError, match="the step trains on v2@"):
        fetch([2])


def fields(row: BatchRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in BatchRow.__slots__}


@pytest.mark.parametrize(("arguments", "is_over"), [({"over": True}, True), ({"over": False}, False)])
def test_every_rank_knows_whether_the_run_is_over(
    ranks: Ranks, arguments: dict[str, bool], is_over: bool
) -> None:
    queue = CommandQueue()
    queue.submit(STOP, arguments)
    loop = CommandLoop(ranks, dict, queue)
    loop.run()
    assert loop.is_over == is_over


@pytest.mark.parametrize(("bound", "oldest"), [(0, 4), (2, 2)])
def test_rows_are_at_most_as_old_as_the_bound(bound: int, oldest: int) -> None:
    learner: Any = SimpleNamespace(version=4, config=SimpleNamespace(barrier=SimpleNamespace(bound=bound)))
    commands: Any = object.__new__(Commands)
    commands._learner = learner
    for version in range(6):
        order = TrainOrder(step=5, policy=PolicyTag(version=version, digest="0" * 16), rows=())
        if oldest <= version <= 4:
            commands._require_next(order)
        else:
            with pytest.raises(CommandError, match=f"at most {bound} versions older"):
                commands._require_next(order)
