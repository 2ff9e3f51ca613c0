"""The offline checker: reads a run's journal and reports the invariants that do not hold.

`python -m paceline.controller.audit RUN_DIR` prints one sentence per breach and exits with 1 if there is any.

I1  every trained token has the step's policy version and digest
I2  every prompt that a finished step asked for, at first or in a refill, is asked for once and ends in
    exactly one of {trained once, dropped with a reason, set aside with a reason when all its samples were
    in}; where greedy answers are asked for, each trained prompt has one
I3  no trajectory is admitted twice in a step
I4  a version is committed with one digest
I4b after a rollback the version is committed with the digest of the step that the run went back to
I5  phases follow each other as `phases.move` allows
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.phases import Phase, move
from paceline.core.errors import IllegalTransitionError, PacelineError, exit_code
from paceline.core.ids import Purpose, TrajectoryId

Event = Mapping[str, Any]


def read(path: Path) -> list[Event]:
    """The events of a journal file; a last line that was cut off by a crash is left out."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def violations(events: Iterable[Event], *, num_samples: int) -> list[str]:
    """One sentence per breach, [] for a sound journal.

    Args:
        events: in order; a resumed run's later events replace those of the steps that it repeats.
        num_samples: rollout.n of the run.
    """
    auditor = _Auditor(num_samples)
    for event in events:
        auditor.check(event)
    return auditor.violations


class _Auditor:
    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.violations: list[str] = []
        self._phase: Phase | None = None
        self._digests: dict[int, str] = {}
        self._went_back: dict[int, int] = {}
        self._current: str = ""
        self._step = 0
        self._wanted: set[int] = set()
        self._num_first = 0
        self._num_greedy = 0
        self._policy = ""
        self._admitted = Counter[TrajectoryId]()
        self._greedy = Counter[TrajectoryId]()
        self._untrained: set[int] = set()
        self._collecting = False
        self._handlers: Mapping[str, Callable[[Event], None]] = {
            "run": self._on_run,
            "phase": self._on_phase,
            "commit": self._on_commit,
            "rollback": self._on_rollback,
            "dispatch": self._on_dispatch,
            "trajectory": self._on_trajectory,
            "group_dropped": self._on_group_dropped,
            "refill": self._on_refill,
        }

    def check(self, event: Event) -> None:
        """Checks one event against those before it."""
        handler = self._handlers.get(event["event"])
        if handler is not None:
            handler(event)

    def _on_run(self, event: Event) -> None:
        self._phase, self._collecting, self._wanted = Phase.STARTING, False, set()
        self._went_back.clear()
        self._digests = {v: d for v, d in self._digests.items() if v < int(event["step"])}

    def _on_phase(self, event: Event) -> None:
        to = Phase(event["to"])
        if self._phase is not None:
            try:
                move(self._phase, to)
            except IllegalTransitionError as error:
                self.violations.append(f"I5: event {event['n']}: {error}")
        self._phase = to
        if to is Phase.LEARN:
            self._collecting = False

    def _on_commit(self, event: Event) -> None:
        version, digest = int(event["version"]), str(event["digest"])
        if self._digests.setdefault(version, digest) != digest:
            self.violations.append(
                f"I4: version {version} was committed as {self._digests[version]} and as {digest}"
            )
        source = self._went_back.pop(version, version)
        if self._digests.get(source, digest) != digest:
            self.violations.append(
                f"I4b: version {version} is a rollback to {source}, which was committed as "
                f"{self._digests[source]}, but has {digest}"
            )
        self._current = f"v{version}@{digest}"
        if self._wanted and version == self._step:
            self._close_step()

    def _on_rollback(self, event: Event) -> None:
        self._went_back[int(event["step"])] = int(event["to_step"])

    def _on_dispatch(self, event: Event) -> None:
        self._step, self._wanted = int(event["step"]), set(event["prompts"])
        self._policy = str(event["policy"])
        self._num_first, self._num_greedy = len(self._wanted), int(bool(event.get("greedy")))
        self._admitted, self._greedy, self._untrained, self._collecting = Counter(), Counter(), set(), True
        if self._policy != self._current:
            self.violations.append(
                f"I1: step {self._step} was dispatched for {self._policy}, but "
                f"{self._current or 'nothing'} is committed"
            )

    def _on_trajectory(self, event: Event) -> None:
        key = TrajectoryId.parse(event["id"])
        if event["verdict"] != "admitted" or key.purpose == Purpose.VALIDATE.value:
            return
        if event.get("policy", self._policy) != self._policy:
            self.violations.append(f"I1: {key} of {event['policy']} was admitted in a step of {self._policy}")
        if key.step != self._step or not self._collecting:
            self.violations.append(f"I1: {key} was admitted outside the collection of its step")
        admitted = self._greedy if key.purpose == Purpose.GREEDY.value else self._admitted
        admitted[key] += 1
        if admitted[key] == 2:
            self.violations.append(f"I3: {key} was admitted twice")

    def _on_group_dropped(self, event: Event) -> None:
        self._leave_out(int(event["prompt"]), "dropped", event)

    def _on_refill(self, event: Event) -> None:
        per_prompt = Counter(key.prompt_id for key in self._admitted)
        for prompt, _ in event["set_aside"]:
            self._leave_out(int(prompt), "set aside", event)
            if per_prompt[prompt] != self._num_samples:
                self.violations.append(
                    f"I2: prompt {prompt} of step {self._step} was set aside with {per_prompt[prompt]} of "
                    f"{self._num_samples} samples"
                )
        for prompt in event["prompts"]:
            if prompt in self._wanted:
                self.violations.append(f"I2: prompt {prompt} was asked for twice in step {self._step}")
            self._wanted.add(prompt)

    def _leave_out(self, prompt: int, how: str, event: Event) -> None:
        if not event.get("reason"):
            self.violations.append(f"I2: prompt {prompt} of step {event['step']} was {how} without a reason")
        if prompt not in self._wanted:
            self.violations.append(
                f"I2: prompt {prompt} was {how} in step {event['step']}, which did not ask for it"
            )
        if prompt in self._untrained:
            self.violations.append(
                f"I2: prompt {prompt} of step {event['step']} was {how} though it was out already"
            )
        self._untrained.add(prompt)

    def _close_step(self) -> None:
        per_prompt = Counter(key.prompt_id for key in self._admitted)
        with_greedy = Counter(key.prompt_id for key in self._greedy)
        trained = sorted(self._wanted - self._untrained)
        if len(trained) > self._num_first:
            self.violations.append(
                f"I2: step {self._step} trained {len(trained)} prompts, more than the {self._num_first} that "
                "it began with"
            )
        for prompt in trained:
            if per_prompt[prompt] != self._num_samples:
                self.violations.append(
                    f"I2: prompt {prompt} of step {self._step} ended with {per_prompt[prompt]} of "
                    f"{self._num_samples} samples and was not dropped"
                )
            if with_greedy[prompt] != self._num_greedy:
                self.violations.append(
                    f"I2: prompt {prompt} of step {self._step} was trained with {with_greedy[prompt]} of "
                    f"{self._num_greedy} greedy answers"
                )
        for prompt in sorted(set(per_prompt) - self._wanted):
            self.violations.append(
                f"I2: prompt {prompt} was trained in step {self._step}, which did not ask for it"
            )
        self._wanted = set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Audits a run directory; returns 0 for a sound journal, 1 for breaches, 2 where there is no run."""
    parser = argparse.ArgumentParser(prog="python -m paceline.controller.audit", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="holds events.jsonl and config.resolved.yaml")
    run_dir: Path = parser.parse_args(arguments).run_dir
    try:
        num_samples = load(RunConfig, run_dir / "config.resolved.yaml").rollout.n
        events = read(run_dir / "events.jsonl")
    except PacelineError as error:
        print(error, file=sys.stderr)
        return exit_code(error)
    except OSError as error:
        print(f"{run_dir} has no journal: {error.strerror}; give a run directory", file=sys.stderr)
        return 2
    breaches = violations(events, num_samples=num_samples)
    print("\n".join(breaches) or f"{len(events)} events: every invariant holds")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
