"""Entry point, ordered shutdown, exit codes: as a process, since signals and exit codes belong to one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from paceline.core.errors import ConfigError
from paceline.service.member import runtime
from paceline.service.member.runtime import ServiceContext
from paceline.service.member.shutdown import ShutdownStack
from paceline.service.observability import loop_lag, telemetry
from paceline.service.observability.loop_lag import measure_loop_lag
from paceline.service.observability.metrics import Metric
from support.clocks import ManualClock

PROGRAM = """
import asyncio, sys
from paceline.core.errors import ModelError
from paceline.service.member.runtime import run_service

async def step(name):
    print(name, flush=True)

async def main(context):
    context.defer("broker", lambda: step("close broker"))
    context.defer("server", lambda: step("stop server"))
    {body}

sys.exit(run_service(main, name="demo-0", grace_s={grace_s}))
"""

ENDED = ["stop server", "close broker"]


def start(body: str, *, grace_s: float = 5.0) -> subprocess.Popen[str]:
    text = PROGRAM.format(body=body.replace("\n", "\n    "), grace_s=grace_s)
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.splitlines(), err


async def test_tasks_that_have_ended_are_let_go_of() -> None:
    """A server spawns one per policy: what it keeps of each would grow with the run."""
    async with asyncio.TaskGroup() as tasks:
        context = ServiceContext("demo-0", tasks)
        ended = [context.spawn("returns", asyncio.sleep(0)), context.spawn("cancelled", asyncio.sleep(60))]
        ended[1].cancel()
        await asyncio.wait(ended, timeout=120)
        kept = [weakref.ref(task) for task in ended]
        ended.clear()
        gc.collect()
        assert [ref() for ref in kept] == [None, None]


def test_returning_ends_well_in_reverse_order() -> None:
    code, out, err = end(start("context.spawn('beat', asyncio.sleep(100))"))
    assert (code, out) == (0, ENDED)
    assert "INFO demo-0 paceline.service.member.runtime: stopped" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_main_to_stop(number: signal.Signals) -> None:
    process = start("print('up', flush=True)\nawait context.stopping.wait()\nprint('asked', flush=True)")
    assert read_line(process) == "up"
    process.send_signal(number)
    assert end(process)[:2] == (0, ["asked", *ENDED])


def test_an_error_on_purpose_is_one_sentence() -> None:
    code, out, err = end(start("raise ModelError('no tokenizer in m; save one there')"))
    assert (code, out) == (2, ENDED)
    assert err.splitlines()[-1].endswith(
        "ERROR demo-0 paceline.service.member.runtime: fatal: no tokenizer in m; save one there"
    )
    assert "Traceback" not in err


def test_a_bug_shows_its_traceback_above_the_sentence() -> None:
    code, _, err = end(start("[][1]"))
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].endswith("fatal: IndexError: list index out of range")


def test_a_spawned_task_that_dies_takes_the_service_down() -> None:
    task = "async def work():\n    raise ModelError('beat lost')\n"
    body = f"{task}context.spawn('beat', work())\nawait asyncio.sleep(100)"
    code, out, err = end(start(body))
    assert (code, out) == (2, ENDED)
    assert "fatal: beat lost" in err


def test_main_that_does_not_listen_is_cancelled_after_its_grace() -> None:
    process = start("print('up', flush=True)\nawait asyncio.sleep(1000)", grace_s=0.3)
    assert read_line(process) == "up"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out, err = end(process)
    assert (code, out) == (1, ENDED)
    assert "did not stop within 0.3 s" in err
    assert time.monotonic() - began < 300  # and not the thousand seconds of its sleep


# --- a grace


@contextlib.contextmanager
def graceful(context: ServiceContext, wait_s: float) -> Iterator[list[float]]:
    """Signals reach the context, which may wait so long; yields when it was asked."""
    loop, asked = asyncio.get_running_loop(), list[float]()
    context.before_stopping(lambda: asked.append(loop.time()))
    with runtime._signals(context, 300.0, wait_s + runtime._ENDING_S if wait_s else 0.0):
        yield asked


async def signalled(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.05)  # the loop reads signals from a socket


@pytest.mark.parametrize(
    ("number", "wait_s", "is_asked"),
    [(signal.SIGTERM, 300.0, True), (signal.SIGTERM, 0.0, False), (signal.SIGINT, 300.0, False)],
)
async def test_sigterm_asks_first_where_there_is_a_grace(
    number: signal.Signals, wait_s: float, is_asked: bool
) -> None:
    async with asyncio.TaskGroup() as tasks:
        context = ServiceContext("demo-0", tasks)
        with graceful(context, wait_s) as asked:
            await signalled(number)
            assert (len(asked), context.stopping.is_set()) == (is_asked, not is_asked)
            assert context.is_terminated == is_asked
            if is_asked:
                # The same signal again, of a parent that dies too, is no second request; one later is.
                await signalled(number)
                assert not context.stopping.is_set()
                await asyncio.sleep(runtime._SAME_SIGNAL_S)
                await signalled(number)
                assert context.stopping.is_set()


async def test_the_end_of_the_grace_stops_a_service_that_nobody_lets_go() -> None:
    async with asyncio.TaskGroup() as tasks:
        context = ServiceContext("demo-0", tasks)
        with graceful(context, 0.2) as asked:
            await signalled(signal.SIGTERM)
            async with asyncio.timeout(120):
                await context.stopping.wait()
            assert asyncio.get_running_loop().time() - asked[0] >= 0.19


@pytest.mark.parametrize(
    ("contexts", "code"),
    [([], 0), ([(False, False)], 0), ([(True, False)], 143), ([(True, True)], 0)],
)
async def test_an_end_before_the_run_is_over_has_a_code_with_which_it_is_started_again(
    contexts: list[tuple[bool, bool]], code: int
) -> None:
    async with asyncio.TaskGroup() as tasks:
        made = [ServiceContext("demo-0", tasks) for _ in contexts]
        for each, (is_terminated, is_over) in zip(made, contexts, strict=True):
            each.is_terminated, each.is_over = is_terminated, is_over
        assert runtime._code_of(made) == code


def test_a_process_with_a_grace_serves_on_and_ends_with_143(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.STOP_GRACE, "600")
    process = start(
        "context.before_stopping(lambda: (print('asked', flush=True), context.stop('let go')))\n"
        "print('up', flush=True)\nawait context.stopping.wait()"
    )
    assert read_line(process) == "up"
    process.send_signal(signal.SIGTERM)
    assert end(process)[:2] == (143, ["asked", *ENDED])


@pytest.mark.parametrize("text", ["ten", "-1", "inf"])
def test_a_grace_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.STOP_GRACE, text)
    with pytest.raises(ConfigError, match="must be a number of seconds"):
        runtime.stop_grace_s()
    monkeypatch.setenv(runtime.STOP_GRACE, "")
    assert runtime.stop_grace_s() == 0


async def test_shutdown_steps_run_in_reverse_and_do_not_stop_at_a_failure() -> None:
    stack, taken = ShutdownStack(), []

    async def fine(name: str) -> None:
        taken.append(name)

    async def fails() -> None:
        taken.append("fails")
        raise ConnectionError("gone")

    async def hangs() -> None:
        taken.append("hangs")
        await asyncio.sleep(100)

    stack.defer("first", lambda: fine("first"))
    stack.defer("second", fails)
    stack.defer("third", hangs, budget_s=0.05)
    outcomes = await stack.close()
    assert taken == ["hangs", "fails", "first"]
    assert [(one.name, one.error) for one in outcomes] == [
        ("third", "not done within 0.05 s"),
        ("second", "ConnectionError: gone"),
        ("first", None),
    ]
    assert await stack.close() == []


async def test_a_blocked_event_loop_is_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded: list[tuple[Metric, float]] = []
    clock, lags, ended = ManualClock(), iter([0.0, 1.5, 0.25, 0.125]), asyncio.Event()

    async def sleep(seconds: float) -> None:
        if (lag_s := next(lags, None)) is None:
            ended.set()
            await asyncio.Event().wait()
        else:
            clock.advance(seconds + lag_s)

    monkeypatch.setattr(loop_lag, "time", clock)
    monkeypatch.setattr(loop_lag, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(telemetry, "record", lambda metric, value: recorded.append((metric, value)))
    measuring = asyncio.create_task(measure_loop_lag(interval_s=0.5))
    async with asyncio.timeout(120):
        await ended.wait()
    measuring.cancel()
    assert [metric.name for metric, _ in recorded] == ["paceline_event_loop_lag_seconds"] * 2
    assert [worst_s for _, worst_s in recorded] == [1.5, 0.25]
    assert caplog.text.count("this process did nothing for") == 1
    assert "this process did nothing for 1.5 s" in caplog.text
