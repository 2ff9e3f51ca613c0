"""The live view: plain lines, the table, and following a run."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from rich.console import Console

from paceline.core.errors import PeerLostError
from paceline.core.run_record.run_events import EndEvent
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.service.identity.credentials import Credentials
from paceline.show.live import table
from paceline.show.live.follow import follow
from paceline.show.live.signs import Signs
from paceline.show.live.table import LiveView
from paceline.show.live.view import JsonView, Pace, PlainView, step_line
from support.clocks import ManualClock
from support.fake_controller import FakeController, end_event, serve, step_event

METRICS = {
    "critic/score/mean": 0.5,
    "val/reward/mean": 0.625,
    "algorithm/reference_kl": 0.01234,
    "actor/ppo_kl": 0.5,
    "actor/pg_clipfrac": 0.03,
    "actor/entropy": 1.25,
    "perf/tokens_per_s": 5200.4,
    "timing_s/gen": 1.5,
    "timing_s/reward": 0.1,
    "timing_s/learn": 2.0,
    "timing_s/update_actor": 1.1,
    "timing_s/update_weights": 0.05,
    "timing_s/step": 3.7,
    "barrier/wait_s": 0.9,
}


def test_a_step_in_one_line() -> None:
    assert step_line(3, 9, METRICS) == (
        "step 3/9  reward 0.500  val 0.625  KL 0.0123  clip 0.030  entropy 1.250  tokens/s 5,200  "
        "gen 1.50 s  score 0.10 s  learn 2.00 s  push 0.05 s  step 3.70 s  wait 0.90 s"
    )
    assert step_line(0, 9, {"val/reward/mean": 0.31}) == "step 0/9  val 0.310"
    of_sets = {"val/b/reward/mean": 0.2, "val/a/reward/mean": 0.1, "val/a/source/x/reward/mean": 0.3}
    assert step_line(0, 9, of_sets) == "step 0/9  val a 0.100  val b 0.200"
    both = of_sets | {"val/reward/mean": 0.31}
    assert step_line(0, 9, both) == "step 0/9  val 0.310  val a 0.100  val b 0.200"


def test_the_kl_column_prefers_the_reference() -> None:
    assert "KL 0.0123" in step_line(1, 9, METRICS)
    assert step_line(1, 9, {"actor/ppo_kl": 0.5}) == "step 1/9  KL 0.5000"


def test_plain_lines_break_a_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = ManualClock(), io.StringIO()
    monkeypatch.setattr("paceline.show.live.view.time", clock)
    view = PlainView(9, out=out, quiet_s=5.0)
    view.pulse()
    view.phase(step=0, phase="waiting for the learner", admitted=0, wanted=0)
    clock.advance(4.9)
    view.pulse()
    clock.advance(0.2)
    view.pulse()
    view.step(0, {"weights/pause_ms": 3.0})
    view.phase(step=1, phase="collect", admitted=3, wanted=64)
    view.notice("rollout-1 is gone")
    view.pulse()
    assert out.getvalue().splitlines() == [
        "step 0/9: waiting for the learner, 5 s so far",
        "note: rollout-1 is gone",
    ]


def test_each_set_of_held_out_prompts_has_a_column_of_its_own() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, legacy_windows=False, color_system=None)
    view = LiveView("paceline demo", 9, console=console)
    view.step(0, {"val/a/reward/mean": 0.1, "val/b/reward/mean": 0.2})
    view.step(1, {"val/b/reward/mean": 0.3})
    header, first, second = (line.split() for line in render(view).splitlines()[1:4])
    assert header[:6] == ["step", "reward", "val", "a", "val", "b"]
    assert (first, second) == (["0/9", "0.100", "0.200"], ["1/9", "0.300"])


def test_the_live_table_shows_phases_rows_and_notices() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, legacy_windows=False, color_system=None)
    view = LiveView("paceline demo", 9, console=console)
    view.milestone("the controller answers")
    view.phase(step=1, phase="collect", admitted=40, wanted=64)
    text = render(view)
    assert "the controller answers" in text
    assert "step 1/9  collect 40/64" in text
    view.step(1, METRICS)
    view.notice("rollout-1 is gone")
    text = render(view)
    header, row = (line.split() for line in text.splitlines()[1:3])
    assert header[:6] == ["step", "reward", "val", "KL", "clip", "entropy"]
    assert row == [
        "1/9",
        "0.500",
        "0.625",
        "0.0123",
        "0.030",
        "1.250",
        "5,200",
        "1.50",
        "0.10",
        "2.00",
        "0.05",
        "3.70",
        "0.90",
    ]
    assert "note: rollout-1 is gone" in text
    view.close()
    assert "collect" not in render(view), "the status line goes with the end"


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (
            140,
            [
                "step",
                "reward",
                "val",
                "KL",
                "clip",
                "entropy",
                "tokens/s",
                "gen s",
                "score s",
                "learn s",
                "push s",
            ],
        ),
        (80, ["step", "reward", "val", "KL", "clip", "entropy", "tokens/s", "gen s", "score s"]),
        (40, ["step", "reward", "val", "KL"]),
        (20, ["step", "reward"]),
    ],
)
def test_columns_leave_from_the_right_and_numbers_are_whole(width: int, header: list[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)
    view = LiveView(
        "paceline models/a-name-that-is-long runs/a-name-that-is-long-too" * 2, 1000, console=console
    )
    view.phase(step=14, phase="collect", admitted=1000, wanted=1024)
    for step in (999, 1000):
        view.step(step, METRICS)
    lines = render(view, width=width).splitlines()
    view.close()
    assert all(len(line) <= width for line in lines)
    shown = [word for word in lines[1].split("  ") if word.strip()]
    assert [word.strip() for word in shown][: len(header)] == header
    assert "1000/1000 0.500 0.625 0.0123 0.030 1.250 5,200 1.50 0.10 2.00 0.05 3.70 0.90".startswith(
        " ".join(lines[3].split())
    )
    assert len(lines[3].split()) == len(shown)


def test_notes_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(table.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=True, width=160, legacy_windows=False)
    view = LiveView("paceline demo", 9, console=console)
    view.notice("rollout-1 is gone")
    now = 219.0
    assert "rollout-1 is gone" in render(view)
    now = 221.0
    assert "rollout-1 is gone" not in render(view)
    view.close()


def test_notes_of_the_start_go_with_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, legacy_windows=False)
    view = LiveView("paceline demo", 9, console=console)
    view.notice("rollout-1 is ready")
    assert "rollout-1 is ready" in render(view)
    view.step(0, {})
    view.notice("step 0: entropy fell")
    view.step(1, {})
    drawn = render(view)
    assert "rollout-1 is ready" not in drawn
    assert "step 0: entropy fell" in drawn
    view.close()


def test_the_time_to_the_end() -> None:
    pace = Pace(100)
    assert (pace.to_go_s, pace.words()) == (None, "")
    pace.step(0, 50.0)
    assert pace.to_go_s is None
    pace.step(1, 60.0)
    assert (pace.to_go_s, pace.words()) == (990.0, "to go 16:30")
    for step in range(2, 30):
        pace.step(step, 60.0 + 2.0 * step)
    # Of the last ten steps alone.
    assert pace.to_go_s == 142.0
    pace.step(100, 500.0)
    assert pace.words() == ""


def test_json_lines_for_programs() -> None:
    out = io.StringIO()
    view = JsonView(9, out=out)
    view.milestone("the controller answers")
    view.phase(step=1, phase="collect", admitted=3, wanted=64)
    view.step(1, {"actor/lr": float("nan"), "critic/score/mean": 0.5})
    view.notice("rollout-1 is gone")
    view.end(ok=True, message="9 steps done", run_dir="runs/run")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all(line.pop("seconds") >= 0 for line in lines)
    assert lines == [
        {"event": "milestone", "text": "the controller answers"},
        {"event": "begin", "step": 1},
        {
            "event": "step",
            "step": 1,
            "total_steps": 9,
            "to_go_s": None,
            "metrics": {"actor/lr": None, "critic/score/mean": 0.5},
        },
        {"event": "note", "text": "rollout-1 is gone"},
        {"event": "end", "ok": True, "message": "9 steps done", "run_dir": "runs/run"},
    ]


def test_signs_are_said_when_they_begin() -> None:
    signs, said = Signs(), list[str]()
    cut = [0.1, 0.4, 0.5, 0.1, 0.66]
    flat = [0.9, 0.8, 0.7, 0.8, 0.8, 0.9, 1.0]
    for step in range(1, 12):
        metrics = {"actor/entropy": 1.0 if step < 9 else 0.2}
        if step <= len(cut):
            metrics["response_length/clip_ratio"] = cut[step - 1]
        if step <= len(flat):
            metrics["groups/without_spread"] = flat[step - 1]
        said += signs.look(step, metrics)
    assert [line.split(";")[0].split(" beside")[0] for line in said] == [
        "step 2: 40% of the responses were cut off at data.max_response_length",
        "step 5: 66% of the responses were cut off at data.max_response_length",
        (
            "step 6: for 3 steps at least 80% of the prompt groups had the same reward for all samples, "
            "so that their advantages are zero"
        ),
        "step 9: the entropy fell from 1.000 to 0.200 nats per token: the policy explores little",
    ]
    assert Signs().look(0, {"val/reward/mean": 0.1}) == []


def render(view: LiveView, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(view._draw())
    return captured.get()


class Recorder:
    """A view that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.news, self.away = asyncio.Event(), asyncio.Event()

    def milestone(self, text: str) -> None:
        self.told.append(text)

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        self.told.append(f"{phase} {admitted}/{wanted}")

    def step(self, step: int, metrics: object) -> None:
        self.told.append(f"step {step}")
        self.news.set()

    def validation(self, step: int, metrics: object) -> None:
        self.told.append(f"validation {step}")

    def notice(self, text: str) -> None:
        self.told.append(text)
        if text == "the controller is away":
            self.away.set()

    def close(self) -> None:
        self.told.append("close")


async def test_following_survives_a_restart_of_the_stream() -> None:
    fake = FakeController()
    phase = pb.WatchEvent(phase=pb.PhaseEvent(step=1, phase="collect", admitted=1, wanted=4))
    fake.script, fake.end_after_stop = [phase, step_event(1)], False
    server = await serve(fake, token="t")
    view = Recorder()
    following = asyncio.create_task(follow(server.address, Credentials(token="t"), view, patience_s=60))
    await asyncio.wait_for(view.news.wait(), 120)
    # The stream was cut after step 1; the next one begins where it ended.
    fake.script = [
        step_event(2),
        pb.WatchEvent(notice=pb.NoticeEvent(message="n")),
        end_event(ok=True, message="done"),
    ]
    assert await following == EndEvent(ok=True, message="done")
    assert view.told == ["collect 1/4", "step 1", "step 2", "n"]
    await server.stop(0)


async def test_following_a_controller_that_was_started_again() -> None:
    """The new controller reports the steps since its rewind; those that were shown are not shown again."""
    first = FakeController()
    first.script = [step_event(0), step_event(1), step_event(2)]
    server = await serve(first, token="t")
    port, view = int(server.address.rpartition(":")[2]), Recorder()
    following = asyncio.create_task(follow(server.address, Credentials(token="t"), view, patience_s=60))
    async with asyncio.timeout(120):
        while len(view.told) < 3:  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.01)
    await server.stop(0)
    await asyncio.wait_for(view.away.wait(), 120)
    second = FakeController()
    second.script = [step_event(2), step_event(3), end_event(ok=True, message="3 steps done")]
    server = await serve(second, token="t", port=port)
    assert await following == EndEvent(ok=True, message="3 steps done")
    shown = ["step 0", "step 1", "step 2", "the controller is away", "the controller is back", "step 3"]
    assert view.told == shown
    await server.stop(0)


async def test_following_a_controller_that_is_gone_ends() -> None:
    server = await serve(FakeController())
    await server.stop(0)
    with pytest.raises(PeerLostError):
        await follow(server.address, Credentials(), Recorder(), patience_s=0.2)
