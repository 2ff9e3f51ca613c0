"""The barrier in every state that small collections can reach: two prompts of two samples, all arrivals.

A bag holds what may arrive: good copies, copies from another server, failed rewards, refused groups, samples
of other policies, steps and prompts. Each message may come at any time or never; the collection ends when the
barrier closes. Every reachable state is compared with what follows from the set of messages alone, in
whatever order they came. The same for bounds of 0, 1 and 2 versions, where pushes wait for answers, and where
they land in mid-answer.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest

from paceline.controller.batch.barrier import Barrier, Verdict
from paceline.controller.batch.refill import Refill
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.trajectory import FinishReason, RewardContext, ScoredHeader
from paceline.data.prompts import Prompt
from support.headers import POLICY, scored

T = TypeVar("T")
VERSIONS = [PolicyTag(version=v, digest=f"{v:014x}aa") for v in range(POLICY.version)]
VERSIONS += [POLICY, PolicyTag(version=POLICY.version + 1, digest="00000000000004aa")]
NUM_SAMPLES = 2
FIRST = (1, 2)
FURTHER = (3, 4)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A group that the rollout servers gave up."""

    prompt_id: int
    purpose: Purpose = Purpose.TRAIN


Message = ScoredHeader | Refused


@dataclass(frozen=True, kw_only=True)
class Bag:
    """What may arrive in a collection, and which verdicts that must lead to somewhere."""

    messages: tuple[Message, ...]
    verdicts: frozenset[Verdict]
    with_greedy: bool = False
    max_extra: int | None = None
    k: int = 0
    in_flight: bool = False

    @property
    def policy(self) -> PolicyTag:
        """The oldest that the bound allows."""
        return VERSIONS[POLICY.version - self.k]

    @property
    def commits(self) -> Mapping[int, str] | None:
        """Those of all versions, too old and too new ones as well, where pushes land in mid-answer."""
        return {tag.version: tag.digest for tag in VERSIONS} if self.in_flight else None

    @property
    def allowed(self) -> Collection[PolicyTag]:
        """The policies whose tokens may be trained, as step 4 trains version 3."""
        return (
            [tag for tag in VERSIONS if 0 <= 3 - tag.version <= self.k] if self.in_flight else [self.policy]
        )


def drawn(header: ScoredHeader, versions: Sequence[int | PolicyTag]) -> ScoredHeader:
    """The header, with a token of each of these versions; that of its policy without them."""
    tags = [VERSIONS[v] if isinstance(v, int) else v for v in versions]
    if not tags:
        return header
    ranges = tuple(PolicyRange(tag, place, place + 1) for place, tag in enumerate(tags))
    return replace(
        header,
        policy=tags[0],
        ranges=ranges if len(tags) > 1 else (),
        num_response_tokens=len(tags),
        num_sampled_tokens=len(tags),
    )


def good(
    prompt_id: int, sample_index: int, *, versions: Sequence[int | PolicyTag] = (), **fields: Any
) -> ScoredHeader:
    fields.setdefault("reward", float(sample_index))
    header = drawn(scored(prompt_id, sample_index, **fields), versions)
    policies = [str(part.policy) for part in header.policy_ranges]
    return replace(header, blob_digest=f"{header.trajectory_id} of {', '.join(policies)}")


def samples(prompt_id: int, **fields: Any) -> list[ScoredHeader]:
    return [good(prompt_id, index, **fields) for index in range(NUM_SAMPLES)]


def failed(prompt_id: int, sample_index: int, kind: str = "timeout", **fields: Any) -> ScoredHeader:
    return scored(prompt_id, sample_index, reward_error=(kind, f"it was a {kind}"), **fields)


GREEDY = {"purpose": Purpose.GREEDY}
OTHER = {"server_id": "rollout-1"}
"""A copy from another server has the same tokens, so its blob has the same digest."""
BAGS = {
    "copies": Bag(
        messages=(*samples(1), *samples(2), *samples(1, **OTHER), *samples(2, **OTHER)),
        verdicts=frozenset({Verdict.ADMITTED, Verdict.DUPLICATE}),
    ),
    "strangers": Bag(
        messages=(
            *samples(1),
            *samples(2),
            good(1, 0, policy=PolicyTag(version=POLICY.version - 1, digest=POLICY.digest)),
            good(1, 0, policy=PolicyTag(version=POLICY.version, digest="f" * 16)),
            good(2, 1, step=3),
            good(9, 0),
            Refused(prompt_id=9),
            good(2, 0, finish_reason=FinishReason.ABORT, **OTHER),
            good(1, NUM_SAMPLES),
            good(2, 0, purpose=Purpose.VALIDATE),
        ),
        verdicts=frozenset(
            {
                Verdict.ADMITTED,
                Verdict.ABORTED,
                Verdict.WRONG_VERSION,
                Verdict.WRONG_DIGEST,
                Verdict.UNKNOWN,
            }
        ),
    ),
    "failures and late copies": Bag(
        messages=(
            *samples(1),
            *samples(2),
            good(1, 0, **OTHER),
            failed(1, 0),
            failed(1, 0, "crashed", **OTHER),
            failed(1, 1),
            failed(2, 1),
            Refused(prompt_id=1),
            Refused(prompt_id=2),
        ),
        verdicts=frozenset({Verdict.ADMITTED, Verdict.DUPLICATE, Verdict.REWARD_ERROR}),
    ),
    "greedy answers": Bag(
        messages=(
            *samples(1),
            *samples(2),
            good(1, 0, **GREEDY),
            good(2, 0, **GREEDY),
            good(2, 0, **GREEDY, **OTHER),
            failed(1, 0, **GREEDY),
            failed(2, 1),
            Refused(prompt_id=2, purpose=Purpose.GREEDY),
            Refused(prompt_id=2),
            good(1, 1, **GREEDY),
        ),
        verdicts=frozenset({Verdict.ADMITTED, Verdict.DUPLICATE, Verdict.REWARD_ERROR, Verdict.UNKNOWN}),
        with_greedy=True,
    ),
    "groups that teach nothing": Bag(
        messages=(
            *samples(1, reward=1.0),
            *samples(2),
            *samples(3, reward=0.0),
            *samples(4),
            good(1, 0, reward=1.0, **OTHER),
            failed(1, 1),
            failed(3, 0),
            Refused(prompt_id=1),
            Refused(prompt_id=4),
        ),
        verdicts=frozenset(
            {Verdict.ADMITTED, Verdict.DUPLICATE, Verdict.REWARD_ERROR, Verdict.GROUP_DROPPED}
        ),
        max_extra=2,
    ),
    "a bound on what is drawn": Bag(
        messages=(
            *samples(1, reward=1.0),
            *samples(2, reward=0.0),
            *samples(3),
            failed(3, 1),
            good(2, 1, reward=0.0, **OTHER),
        ),
        verdicts=frozenset({Verdict.ADMITTED, Verdict.REWARD_ERROR, Verdict.GROUP_DROPPED}),
        max_extra=1,
    ),
}


def bounded(k: int, *, in_flight: bool) -> Bag:
    """Samples of all versions around those that a bound of `k` allows in step 4."""
    oldest, newest = 3 - k, 3
    forged = PolicyTag(version=newest if in_flight else oldest, digest="f" * 16)
    messages: list[Message] = [
        *(good(1, 0, versions=[v]) for v in range(VERSIONS[-1].version + 1)),
        good(1, 1, versions=[oldest]),
        good(1, 1, versions=[newest if in_flight else oldest], **OTHER),
        good(2, 1, versions=[oldest]),
        Refused(prompt_id=2),
        failed(2, 1, policy=VERSIONS[oldest - 1]),
        failed(2, 1, policy=VERSIONS[oldest]),
        good(1, 1, versions=[forged]),
        good(2, 0, versions=[oldest], step=3),
    ]
    if in_flight:
        messages += [
            good(2, 0, versions=[*range(oldest, newest + 1)]),
            good(2, 0, versions=[oldest - 1, oldest]),
            good(2, 0, versions=[newest, newest + 1]),
            good(2, 1, versions=[oldest, forged] if k else [oldest, newest + 1]),
        ]
    else:
        messages += [good(2, 0, versions=[oldest]), good(2, 0, versions=[oldest], **OTHER)]
    wrong = {Verdict.WRONG_VERSION, Verdict.WRONG_DIGEST, Verdict.UNKNOWN}
    return Bag(
        messages=tuple(messages),
        verdicts=frozenset({Verdict.ADMITTED, Verdict.REWARD_ERROR} | wrong),
        k=k,
        in_flight=in_flight,
    )


BOUNDED = {
    f"a bound of {k}, pushes {'in mid-answer' if in_flight else 'between answers'}": bounded(
        k, in_flight=in_flight
    )
    for k in (0, 1, 2)
    for in_flight in (False, True)
}


# --- what must follow from a set of messages


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Where each prompt stands, by the messages alone."""

    asked: tuple[int, ...]
    closed: bool
    aside: frozenset[int]
    dropped: Mapping[int, str]
    trained: frozenset[int]


class Oracle:
    """Says what a set of messages leads to."""

    def __init__(self, bag: Bag) -> None:
        self.bag = bag
        self._keys = {p: self._keys_of(p) for p in (*FIRST, *FURTHER)}

    def _keys_of(self, prompt_id: int) -> list[TrajectoryId]:
        kinds = [("train", i) for i in range(NUM_SAMPLES)] + [("greedy", 0)] * self.bag.with_greedy
        return sorted(
            TrajectoryId(step=4, purpose=purpose, prompt_id=prompt_id, sample_index=index)
            for purpose, index in kinds
        )

    def expect(self, arrived: Collection[Message]) -> Expectation:
        headers = [m for m in arrived if isinstance(m, ScoredHeader) and _counts(m, self.bag)]
        rewards = {h.trajectory_id: h.reward for h in headers if h.reward_error is None}
        complete = {p for p, keys in self._keys.items() if all(key in rewards for key in keys)}
        asked, aside = list(FIRST), set[int]()
        further = list(FURTHER[: self.bag.max_extra or 0])
        for prompt in asked:
            scores = {rewards.get(key) for key in self._keys[prompt]}
            if self.bag.max_extra is not None and prompt in complete and len(scores) == 1:
                aside.add(prompt)
                asked += [further.pop(0)] if further else []
        reasons = {p: self._reasons(p, arrived, headers) for p in asked if p not in complete}
        missing = {p: [key for key in self._keys[p] if key not in rewards] for p in reasons}
        open_ = {p for p, keys in missing.items() if any(key not in reasons[p] for key in keys)}
        return Expectation(
            asked=tuple(sorted(asked)),
            closed=not open_,
            aside=frozenset(aside),
            dropped={p: reasons[p][keys[0]] for p, keys in missing.items() if p not in open_},
            trained=frozenset(set(asked) & complete - aside),
        )

    def _reasons(
        self, prompt: int, arrived: Iterable[Message], headers: Iterable[ScoredHeader]
    ) -> dict[TrajectoryId, str]:
        """Of each failed sample the least of its reasons."""
        reasons: dict[TrajectoryId, set[str]] = {}
        for header in headers:
            if header.reward_error is not None:
                reasons.setdefault(header.trajectory_id, set()).add(f"reward:{header.reward_error[0]}")
        for message in arrived:
            if isinstance(message, Refused) and message.prompt_id == prompt:
                for key in self._keys[prompt]:
                    if key.purpose == message.purpose.value:
                        reasons.setdefault(key, set()).add("rollout:engine")
        return {key: min(texts) for key, texts in reasons.items()}


def _counts(header: ScoredHeader, bag: Bag) -> bool:
    """Whether a header is of this collection at all."""
    key = header.trajectory_id
    return (
        all(part.policy in bag.allowed for part in header.policy_ranges)
        and key.step == 4
        and key.purpose != "validate"
        and key.sample_index < (NUM_SAMPLES if key.purpose == "train" else 1)
        and header.finish_reason is not FinishReason.ABORT
    )


# --- the exploration


class State:
    """A barrier with its refill, after some messages."""

    def __init__(self, bag: Bag) -> None:
        self.barrier = Barrier(
            step=4,
            policy=bag.policy,
            max_staleness=bag.k,
            commits=bag.commits,
            counts={"train": NUM_SAMPLES} | ({"greedy": 1} if bag.with_greedy else {}),
            prompts=FIRST,
        )
        self.refill = None
        if bag.max_extra is not None:
            self.refill = Refill(asked=FIRST, max_extra=bag.max_extra, draw=_draw)

    def after(self, message: Message) -> tuple[State, Verdict | None]:
        """The state that a message leads to; this one stays as it is."""
        state: State = copy.copy(self)
        vars(state).pop("key", None)
        state.barrier = _clone(self.barrier)
        state.refill = None if self.refill is None else _clone(self.refill)
        if isinstance(message, Refused):
            state.barrier.refuse(
                message.prompt_id, message.purpose, reason="rollout:engine", message="out of memory"
            )
            return state, None
        verdict = state.barrier.judge(message)
        assert state._key() == self.key, "judging changed the barrier"
        state.barrier.apply(message, verdict)
        if state.refill is not None:
            state.refill.settle(state.barrier, [message.trajectory_id.prompt_id])
        return state, verdict

    @functools.cached_property
    def key(self) -> object:
        """`_key`, once nothing changes the state any more."""
        return self._key()

    def _key(self) -> object:
        """Equal for states that cannot be told apart; counts of verdicts do not matter."""
        return frozenset(
            (name, _frozen(value)) for name, value in vars(self.barrier).items() if name != "verdicts"
        )


def _draw(count: int, without: Collection[int]) -> Mapping[int, Prompt]:
    left = [prompt for prompt in FURTHER if prompt not in without][:count]
    context = RewardContext(ground_truth="")
    return {p: Prompt(prompt_id=p, token_ids=np.ones(1, dtype=np.int32), context=context) for p in left}


def _clone(thing: T) -> T:
    """A copy whose containers are its own; what lies in them is never changed."""
    clone = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            setattr(clone, name, {key: dict(inner) for key, inner in value.items()})
        elif isinstance(value, dict | set | Counter):
            setattr(clone, name, value.copy())
    return clone


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return frozenset((key, _frozen(inner)) for key, inner in value.items() if inner)
    if isinstance(value, set):
        return frozenset(value)
    return id(value) if isinstance(value, ScoredHeader) else value


def explore(bag: Bag) -> tuple[dict[tuple[int, object], State], Counter[Verdict | None]]:
    """All states, by the messages that have arrived (as bits) and the barrier's key; verdicts on the way."""
    first = State(bag)
    states = {(0, first.key): first}
    verdicts = Counter[Verdict | None]()
    frontier = list(states.items())
    while frontier:
        (arrived, _), state = frontier.pop()
        if state.barrier.closed:
            continue
        missing = set(state.barrier.missing)
        for number, message in enumerate(bag.messages):
            if arrived >> number & 1 or not _may_come(message, state):
                continue
            following, verdict = state.after(message)
            verdicts[verdict] += 1
            if following.key == state.key and not _matters(message, bag):
                # All that may follow is the same: it is no new state.
                continue
            still = set(following.barrier.missing)
            assert still - missing <= set(FURTHER), "a settled group was opened again"
            key = (arrived | 1 << number, following.key)
            if key not in states:
                states[key] = following
                frontier.append((key, following))
    return states, verdicts


def _matters(message: Message, bag: Bag) -> bool:
    """Whether the collection may depend on it."""
    return isinstance(message, Refused) or _counts(message, bag)


def _may_come(message: Message, state: State) -> bool:
    """Prompts that the refill has not drawn yet have no samples."""
    prompt = message.prompt_id if isinstance(message, Refused) else message.trajectory_id.prompt_id
    return prompt not in FURTHER or prompt in state.barrier._expected


@pytest.mark.parametrize("name", [*BAGS, *BOUNDED])
def test_every_state_follows_from_what_has_arrived(name: str) -> None:
    bag = (BAGS | BOUNDED)[name]
    oracle = Oracle(bag)
    states, verdicts = explore(bag)
    assert bag.verdicts <= verdicts.keys()
    closed = [(arrived, state.barrier) for (arrived, _), state in states.items() if state.barrier.closed]
    assert len(states) > 15
    assert closed
    for (arrived, _), state in states.items():
        messages = [m for number, m in enumerate(bag.messages) if arrived >> number & 1]
        missing = [m for number, m in enumerate(bag.messages) if not arrived >> number & 1]
        expected, barrier = oracle.expect(messages), state.barrier
        assert barrier.closed == expected.closed
        assert barrier.num_groups == len(expected.asked)
        assert barrier.num_admitted == len(_admitted(messages, expected.asked, bag))
        if barrier.closed:
            check_outcome(barrier, expected, bag)
        # No deadlock: what every sample has a good copy of ends.
        assert barrier.closed or any(_matters(message, bag) for message in missing)


def _admitted(messages: Iterable[Message], asked: Collection[int], bag: Bag) -> set[TrajectoryId]:
    return {
        m.trajectory_id
        for m in messages
        if isinstance(m, ScoredHeader)
        and _counts(m, bag)
        and m.reward_error is None
        and m.trajectory_id.prompt_id in asked
        and (bag.with_greedy or m.trajectory_id.purpose == "train")
    }


def check_outcome(barrier: Barrier, expected: Expectation, bag: Bag) -> None:
    """I1 to I3 for a closed barrier."""
    batch, greedy = barrier.batch(), barrier.beside().get("greedy", [])
    # I1: nothing but what the bound allows, under any name.
    ranges = [part for h in [*batch, *barrier.aside(), *greedy] for part in h.policy_ranges]
    assert all(0 <= part.policy.staleness_in(4) <= bag.k for part in ranges)
    assert {part.policy for part in ranges} <= set(bag.allowed)
    # I2: each prompt ends in one of three ways, with a reason where it is left out.
    assert {d.prompt_id: d.reason for d in barrier.dropped} == expected.dropped
    assert {h.trajectory_id.prompt_id for h in batch} == expected.trained
    assert {h.trajectory_id.prompt_id for h in barrier.aside()} == expected.aside
    assert sorted([*expected.dropped, *expected.trained, *expected.aside]) == list(expected.asked)
    # I3: each sample once, in order, whatever came first.
    rows = [(h.trajectory_id.prompt_id, h.trajectory_id.sample_index) for h in batch]
    assert rows == [(p, i) for p in sorted(expected.trained) for i in range(NUM_SAMPLES)]
    if bag.with_greedy:
        assert {h.trajectory_id.prompt_id for h in greedy} >= expected.trained


def test_without_failures_there_is_but_one_batch() -> None:
    bag = BAGS["copies"]
    states, _ = explore(bag)
    batches = {
        tuple((str(h.trajectory_id), h.blob_digest, h.reward) for h in state.barrier.batch())
        for state in states.values()
        if state.barrier.closed
    }
    assert len(batches) == 1


def test_with_failures_only_groups_with_both_good_and_failed_copies_depend_on_what_came() -> None:
    """Prompt 2's samples only ever come out well; prompt 1's may fail and come again."""
    both = [*samples(1), failed(1, 0), failed(1, 1, "crashed"), Refused(prompt_id=1), *samples(2)]
    states, _ = explore(Bag(messages=tuple(both), verdicts=frozenset()))
    outcomes = {
        tuple(h.trajectory_id.prompt_id for h in state.barrier.batch())
        for state in states.values()
        if state.barrier.closed
    }
    assert outcomes == {(1, 1, 2, 2), (2, 2)}
