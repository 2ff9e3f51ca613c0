"""Training as a loop over finished steps, run by a `paceline train` process that ends with the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.api.callbacks import Callback, Training
from paceline.api.process import TrainProcess
from paceline.api.step import Step

Say = Callable[[str], object]


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    callbacks: Sequence[Callback] = (),
    say: Say | None = print,
) -> Iterator[Step]:
    """Starts the services, yields each finished step, and stops all in order.

    The run does not wait for the loop's body. Leaving the loop ends the run after the step in progress, with
    a checkpoint; so does KeyboardInterrupt, and a second one ends it at once. The same call later continues
    the run.

    Args:
        config: a file, or the same tree as a mapping.
        overrides: "dotted.key=value", as on the command line.
        callbacks: called in their order before and after each step.
        say: called with notes for the user and with events of the start-up.

    Raises:
        ConfigError: the run cannot be started, or it is finished.
        PacelineError: the run ended with an error.
    """
    tell: Say = say or (lambda text: None)
    with TrainProcess(config, overrides) as run:
        training = Training(run.run_dir, run.process)
        try:
            for event in run.events():
                if event["event"] == "step":
                    step = Step(number=event["step"], metrics=event["metrics"], run_dir=run.run_dir)
                    for callback in callbacks:
                        callback.after_step(step, training)
                    yield step
                elif event["event"] == "validation":
                    step = Step(number=event["step"], metrics=event["metrics"], run_dir=run.run_dir)
                    for callback in callbacks:
                        callback.after_validation(step, training)
                elif event["event"] == "begin":
                    for callback in callbacks:
                        callback.before_step(event["step"], training)
                elif event["event"] in ("milestone", "note"):
                    tell(event["text"])
        except BaseException:
            run.end(tell)
            raise
        run.check(may_stop=training.stopping)
