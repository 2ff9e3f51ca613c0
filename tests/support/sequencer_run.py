"""A sequencer with all its parts in one process, over fake services: what tests of the loop run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.app import validation_collector
from paceline.controller.batch.collect import Collector
from paceline.controller.batch.dispatch import Dispatcher
from paceline.controller.batch.inputs import HeldOutPrompts, Inputs
from paceline.controller.batch.mailboxes import Mailboxes
from paceline.controller.events import EventHub
from paceline.controller.fleet.membership import Fleet
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.fleet.turns import Turns
from paceline.controller.guard.report import Guard
from paceline.controller.journal import Journal
from paceline.controller.progress import Progress, Run
from paceline.controller.run.dataflow.dataflow import load_dataflow
from paceline.controller.run.records.opening import begin_term
from paceline.controller.run.sequencer import Sequencer
from paceline.controller.verify.check import follow
from paceline.controller.verify.findings import Findings
from paceline.controller.verify.journal.entries import read
from paceline.controller.weights.epoch import Epochs
from paceline.controller.weights.push import WeightPush
from paceline.core.clock import SystemClock
from paceline.core.members import LearnerState, MemberKind, MemberState, RewardState, RolloutState
from paceline.core.samples.trajectory import RewardContext
from paceline.data.mixture import PromptMixture
from paceline.data.prompts import Prompt, PromptSet
from paceline.rollout.states import RolloutStatus
from support.fake_fleet import Answer, FakeServices, answer_prompts, answer_validations, score_all
from support.memory_broker import MemoryBroker

RUN = "r"


def config(**changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_files": "t.jsonl", "val_files": "v.jsonl", "train_batch_size": 3},
        "model": {"path": "m"},
        "actor": {"ppo_mini_batch_size": 3},
        "reward": {"functions": [{"name": "exact_match"}]},
        "rollout": {"n": 2, "replicas": 2},
        "trainer": {"total_steps": 2, "save_freq": 1},
        "barrier": {"stall_timeout_s": 30.0},
        "service": {"startup_timeout_s": 300.0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return parse(RunConfig, tree)


def turns_of(run: Run, supervisor: Supervisor, services: FakeServices | None = None) -> Turns:
    """The turns of a run, taken by fake services."""
    services = services or FakeServices()
    learner: Any = services.learner
    rollout: Any = services.rollout
    return Turns(run, supervisor, learner, rollout)


def prompts(num: int, first_id: int = 0) -> PromptSet:
    made = {
        i: Prompt(
            prompt_id=i, token_ids=np.arange(1, 4, dtype=np.int32), context=RewardContext(ground_truth=str(i))
        )
        for i in range(first_id, first_id + num)
    }
    return PromptSet(prompts=made, num_filtered=0)


def inputs_of(cfg: RunConfig) -> Inputs:
    """Seven training prompts, shared out over the training sets, and two for each set of held-out ones."""
    train, data = prompts(7), cfg.data
    ids = train.ids()
    size = len(ids) // len(data.training_sets)
    return Inputs(
        train=train,
        val=tuple(
            HeldOutPrompts(of=of, prompts=prompts(2, 2 * place)) for place, of in enumerate(cfg.held_out_sets)
        ),
        cursor=PromptMixture(
            {of.name: ids[place * size : (place + 1) * size] for place, of in enumerate(data.training_sets)},
            batch_size=data.train_batch_size,
            seed=cfg.prompt_seed,
            schedule=data.weights_by_step,
        ),
        stop_token_ids=(0,),
        encode=lambda v: [*str(v).encode()],
    )


class SequencerRun:
    """A sequencer with all its parts; tests change `services`, `supervisor`, `wait_for_services`."""

    def __init__(
        self,
        cfg: RunConfig,
        folder: Path,
        broker: MemoryBroker,
        fakes: FakeServices | None = None,
    ) -> None:
        self.folder, self.broker, self.services, self.config = folder, broker, fakes or FakeServices(), cfg
        clock, events = SystemClock(), EventHub()
        self.notices: list[str] = []
        self.may_answer: Callable[[], bool] = lambda: True
        self.may_validate: Callable[[int], bool] = lambda version: True
        servers = range(cfg.rollout.training_servers, cfg.rollout.replicas)
        self.services.validators = {f"rollout-{i}" for i in servers if cfg.validates_beside}
        events.notice = self.notices.append  # type: ignore[method-assign]
        self.journal = Journal(folder / "events.jsonl", clock)
        self.run = run = Run(config=cfg, id=RUN, dir=folder, journal=self.journal, events=events)
        self.guard = Guard(run)
        self.supervisor = Supervisor(
            Fleet(clock, suspect_after_s=5, dead_after_s=12), self.journal, events, clock
        )
        inputs = inputs_of(cfg)
        begin_term(self.journal, RUN, cfg, inputs)
        learner: Any = self.services.learner
        rollout: Any = self.services.rollout
        epochs = Epochs(cfg, learner, rollout, self.supervisor.expel, self.supervisor.gone, term=0)
        self.turns = turns_of(run, self.supervisor, self.services)
        self.progress = progress = Progress(run)
        self.sequencer = Sequencer(
            run,
            progress,
            inputs=inputs,
            collector=Collector(
                run,
                broker=broker,
                mailboxes=Mailboxes(broker, RUN, own_server=False),
                dispatcher=Dispatcher(run, broker),
                wait_for_services=lambda: self.wait_for_services(),
                count=lambda *_: None,
            ),
            learner=learner,
            push=WeightPush(epochs, learner, rollout),
            supervisor=self.supervisor,
            guard=self.guard,
            turns=self.turns,
            flow=load_dataflow(cfg),
            collector_of=functools.partial(validation_collector, run, progress, broker),
        )

    async def wait_for_services(self) -> None:
        """What a collection waits for before it judges its progress."""
        await self.supervisor.rollouts_ready(self.config.service.recovery_timeout_s)

    async def enlist(
        self, member_id: str, kind: MemberKind, state: MemberState, incarnation: str = "a"
    ) -> None:
        policy = None
        if kind is MemberKind.ROLLOUT:
            new = RolloutStatus() if state is RolloutState.JOINING else self.services.standing(member_id)
            standing = self.services.standings.setdefault(member_id, new)
            state, policy = standing.state, standing.policy
        changes = self.supervisor.fleet.register(
            kind=kind,
            member_id=member_id,
            incarnation=incarnation,
            address=member_id,
            num_ranks=1,
            state=state,
            policy=policy,
            validates=member_id in self.services.validators,
        )
        await self.supervisor.apply(changes)

    async def enlist_all(self) -> None:
        await self.enlist("learner", MemberKind.LEARNER, LearnerState.READY)
        await self.enlist("reward-0", MemberKind.REWARD, RewardState.SERVING)
        for i in range(max(2, self.config.rollout.replicas)):
            await self.enlist(f"rollout-{i}", MemberKind.ROLLOUT, RolloutState.STALE)

    async def lose(self, member_id: str) -> None:
        """A server's process ends."""
        member = self.supervisor.fleet.get(member_id)
        assert member is not None
        self.services.standings.pop(member_id, None)
        await self.supervisor.apply(self.supervisor.fleet.mark_dead(member, "killed"))

    async def go(self, answer: Answer = score_all, *, timeout_s: float = 300) -> None:
        answering = asyncio.create_task(
            answer_prompts(self.broker, RUN, self.services, answer, lambda: self.may_answer())
        )
        validating = asyncio.create_task(
            answer_validations(
                self.broker, RUN, self.services, answer, lambda version: self.may_validate(version)
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self.sequencer.run()
        finally:
            for task in (answering, validating):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def breaches(self) -> list[str]:
        """What `paceline verify` says of the journal."""
        findings = Findings()
        follow(read(self.folder / "events.jsonl", findings), findings, self.config)
        return [str(breach) for breach in findings.breaches]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@contextlib.asynccontextmanager
async def run(folder: Path, **changes: Any) -> AsyncIterator[SequencerRun]:
    async with run_of(config(**changes), folder) as it:
        yield it


@contextlib.asynccontextmanager
async def run_of(
    cfg: RunConfig, folder: Path, fakes: FakeServices | None = None, broker: MemoryBroker | None = None
) -> AsyncIterator[SequencerRun]:
    """A controller of a run, with these services, that goes on from what is in the folder."""
    it = SequencerRun(cfg, folder, broker or MemoryBroker(), fakes)
    try:
        yield it
    finally:
        it.journal.close()


def guarded(total_steps: int, **rules: Any) -> dict[str, Any]:
    """Changes of the configuration: so many steps, these rules."""
    changes = {f"guard__{name}": bounds for name, bounds in rules.items()}
    return {
        "trainer__val_before_train": False,
        "trainer__total_steps": total_steps,
        **changes,
    }


def events_of(it: SequencerRun, event: str) -> list[dict[str, Any]]:
    """The journal's entries of one kind."""
    return [e for e in it.events() if e["event"] == event]
