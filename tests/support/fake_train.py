"""Stands for `paceline train --json CONFIG`: prints steps until SIGINT, which it heeds after its step.

A second one ends it at once. `trainer.total_steps=2` ends it well, `trainer.name=bad` with an error. With
`trainer.name=steady` a step takes half a second.

With `trainer.name=left` it writes a run of seven steps, and a second start goes on with step 5.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from paceline.service.output import write_whole_lines

asked = 0


def on_signal(*_: object) -> None:
    global asked
    asked += 1
    if asked == 2:
        say(event="note", text="stopping at once")
        sys.exit(130)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


signal.signal(signal.SIGINT, on_signal)
write_whole_lines()
print("a line of a library", flush=True)
say(event="milestone", text="starting")
words = sys.argv[1:]
if "trainer.name=bad" in words:
    sys.exit("a traceback\npaceline train: the learner is gone,\nfor good")
if "trainer.name=refused" in words:
    print("paceline train: there are no GPUs", file=sys.stderr)
    sys.exit(2)
begins, ends = 0, 3 if "trainer.total_steps=2" in words else 10_000
if "trainer.name=left" in words:
    (folder,) = (Path(word.partition("=")[2]) for word in words if word.startswith("trainer.run_dir="))
    if folder.exists():
        begins, ends = 5, 8
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from support.synthetic_run import write_run

        write_run(folder, num_steps=7)
for step in range(begins, ends):
    say(event="begin", step=step)
    say(event="step", step=step, metrics={"critic/score/mean": step / 2, "odd": None}, padding="x" * 5000)
    if asked:
        if "trainer.name=slow" in words:
            say(event="note", text="a long step")
            time.sleep(600)
        say(event="note", text=f"stopped after step {step}")
        sys.exit(130)
    time.sleep(0.5 if "trainer.name=steady" in words else 0.02)
