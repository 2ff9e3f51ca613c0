"""Every order of sampling, training, pushing and losing a server in small runs with a bound on staleness.

The steps that are dispatched ahead are those of `steps_ahead`, and what comes of a step is judged by its
barrier. In each order nothing need be refused, each token is within the bound, and the run ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Barrier, Verdict
from paceline.controller.run.lookahead import steps_ahead
from paceline.core.policy import PolicyRange, PolicyTag
from support.headers import scored
from support.more import more
from support.sequencer_run import config

NUM_SAMPLES, NUM_TOKENS = 2, 2
NUM_STEPS = 4

Tokens = tuple[int, ...]
"""The version that sampled each token so far; complete with `NUM_TOKENS`."""


def tag(version: int) -> PolicyTag:
    return PolicyTag(version=version, digest=f"{version:016x}")


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A step's samples, to be sampled from `version`, or from newer ones where pushes land in mid-answer."""

    version: int
    samples: tuple[Tokens, ...] = ((),) * NUM_SAMPLES

    @property
    def collected(self) -> bool:
        return all(len(tokens) == NUM_TOKENS for tokens in self.samples)

    def without_begun(self) -> Dispatched:
        complete = (tokens if len(tokens) == NUM_TOKENS else () for tokens in self.samples)
        return replace(self, samples=tuple(sorted(complete)))


@dataclass(frozen=True, kw_only=True)
class State:
    """A run at an instant.

    Attributes:
        trained: the last step that is trained.
        served: the version of the servers.
        steps: those that were dispatched, from 1 on.
        losses: how often all servers may still lose what they have begun.
    """

    trained: int = 0
    served: int = 0
    steps: tuple[Dispatched, ...] = ()
    losses: int = 1


class Schedule:
    """The rules of a run."""

    def __init__(self, cfg: RunConfig) -> None:
        self.config, self.k, self.in_flight = cfg, cfg.barrier.bound, cfg.pushes_in_flight

    def dispatched(self, state: State) -> State:
        """The state in which all steps are sent out that may be sent out now."""
        if state.trained > state.served or state.trained == NUM_STEPS:
            return state
        step, steps = state.trained + 1, list(state.steps)
        for due in (step, *steps_ahead(self.config, step)):
            if due > len(steps):
                assert due == len(steps) + 1, "steps are sent out in order"
                steps.append(Dispatched(version=state.served))
            if not self.in_flight and not steps[due - 1].collected:
                break
        return replace(state, steps=tuple(steps))

    def following(self, state: State) -> Iterator[State]:
        for number, step in enumerate(state.steps):
            may_draw = step.version <= state.served if self.in_flight else step.version == state.served
            for index, tokens in enumerate(step.samples if may_draw else ()):
                if len(tokens) < NUM_TOKENS:
                    samples = [*step.samples]
                    samples[index] = (*tokens, state.served)
                    yield _with(state, number, replace(step, samples=tuple(sorted(samples))))
        if state.losses:
            steps = tuple(step.without_begun() for step in state.steps)
            yield replace(state, losses=state.losses - 1, steps=steps)
        if state.trained == state.served < len(state.steps) and state.steps[state.trained].collected:
            yield replace(state, trained=state.trained + 1)
        if state.trained > state.served and (self.in_flight or all(s.collected for s in state.steps)):
            yield replace(state, served=state.trained)

    def check(self, step: int, dispatched: Dispatched) -> None:
        """The batch of a step that is trained."""
        barrier = Barrier(
            step=step,
            policy=tag(dispatched.version),
            max_staleness=self.k,
            commits={v: tag(v).digest for v in range(step)} if self.in_flight else None,
            counts={"train": NUM_SAMPLES},
            prompts=[step],
        )
        for index, tokens in enumerate(dispatched.samples):
            assert all(0 <= step - 1 - version <= self.k for version in tokens)
            parts = [PolicyRange(tag(v), place, place + 1) for place, v in enumerate(tokens)]
            header = replace(scored(step, index, step=step, policy=tag(tokens[0])), ranges=tuple(parts))
            if len(set(tokens)) == 1:
                header = replace(header, ranges=())
            assert barrier.judge(header) is Verdict.ADMITTED
            barrier.apply(header, Verdict.ADMITTED)
        assert len(barrier.batch()) == NUM_SAMPLES


def _with(state: State, number: int, step: Dispatched) -> State:
    return replace(state, steps=(*state.steps[:number], step, *state.steps[number + 1 :]))


@pytest.mark.parametrize(
    ("k", "in_flight", "save_freq"),
    [
        *((k, "wait", save_freq) for k in (0, 1, 2) for save_freq in (0, 3)),
        *((k, "keep", 3) for k in (1, 2)),
        *more((1, "keep", 0), (2, "keep", 0)),
    ],
)
def test_in_every_order_nothing_is_refused_and_the_run_ends(k: int, in_flight: str, save_freq: int) -> None:
    cfg = config(
        barrier__mode="bounded",
        barrier__max_staleness=k,
        algorithm__rollout_correction={"method": "tis"},
        trainer__total_steps=NUM_STEPS,
        trainer__save_freq=save_freq,
        rollout__in_flight=in_flight,
    )
    schedule = Schedule(cfg)
    first = schedule.dispatched(State())
    known, frontier, ages, checked = {first}, [first], set[int](), set[tuple[int, Dispatched]]()
    while frontier:
        state = frontier.pop()
        followers = [schedule.dispatched(following) for following in schedule.following(state)]
        assert followers or state.trained == state.served == NUM_STEPS, f"deadlock: {state}"
        for following in set(followers) - known:
            known.add(following)
            frontier.append(following)
            if following.trained > state.trained:
                step = following.trained
                if (step, state.steps[step - 1]) not in checked:
                    checked.add((step, state.steps[step - 1]))
                    schedule.check(step, state.steps[step - 1])
                ages |= {step - 1 - v for tokens in state.steps[step - 1].samples for v in tokens}
    assert ages == set(range(k + 1))
