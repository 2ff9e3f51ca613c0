"""The root cause of an engine that does not start is found in what its processes have logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import exit_code
from paceline.rollout.engines.vllm.start.cause import first_exception
from paceline.rollout.engines.vllm.start.startup import failure

WORKER = "(Worker pid=8768) ERROR 11-22 06:10:20 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=8763) ERROR 11-22 06:10:20 [core.py:1510] "
LOG = "\n".join(
    [
        "(MainProcess pid=1) WARNING 11-22 06:10:00 [cpu.py:224] RuntimeError: not the engine's",
        f"{WORKER}Traceback (most recent call last):",
        f"{WORKER}    raise ValueError(",
        f"{WORKER}ValueError: 500.0 GiB are asked for, 14.69 are there",
        f"{CORE}RuntimeError: Worker failed with error '500.0 GiB', see the root cause",
    ]
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (LOG, "ValueError: 500.0 GiB are asked for, 14.69 are there"),
        (LOG.replace("Worker pid", "Worker_TP1 pid"), "ValueError: 500.0 GiB are asked for, 14.69 are there"),
        (f"{CORE}torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        (f"{CORE}RuntimeError: of a C++ kernel\r\n", "RuntimeError: of a C++ kernel"),
        ("Traceback\nValueError: of nobody knows whom", ""),
    ],
)
def test_the_first_exception_of_the_engines_processes_counts(text: str, cause: str) -> None:
    assert first_exception(text) == cause


def test_a_dead_engine_says_what_its_processes_said_last(tmp_path: Path) -> None:
    """Of a log that is longer than what is read of it."""
    script = (
        "import sys\n"
        "from paceline.rollout.engines.answers import engine_died\n"
        "from paceline.rollout.engines.vllm.start.cause import ErrorOutput\n"
        "output = ErrorOutput()\n"
        "assert 'log of this server' in str(engine_died(output.root_cause()))\n"
        "sys.stderr.write(('x' * 99 + chr(10)) * 20_000)\n"
        f"sys.stderr.write({CORE + 'NotImplementedError: heads of 16'!r} + chr(10)); sys.stderr.flush()\n"
        "print(engine_died(output.root_cause()))\n"
    )
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=120,
            check=True,
        )
    assert "the inference engine has died: NotImplementedError: heads of 16" in done.stdout


@pytest.mark.parametrize("to_file", [True, False])
def test_only_what_was_written_since_counts_and_only_a_file_can_be_read(
    tmp_path: Path, to_file: bool
) -> None:
    script = (
        "import sys\n"
        "from paceline.rollout.engines.vllm.start.cause import ErrorOutput\n"
        f"sys.stderr.write({CORE + 'ValueError: of the last start'!r} + chr(10)); sys.stderr.flush()\n"
        "output = ErrorOutput()\n"
        f"sys.stderr.write({CORE + 'ValueError: of this start'!r} + chr(10)); sys.stderr.flush()\n"
        "print(output.root_cause())\n"
    )
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=log if to_file else subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout.strip() == ("ValueError: of this start" if to_file else "")


_ENDED = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': %d}"
_UNKNOWN = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_MEMORY = "AssertionError: Error in memory profiling. Initial free memory 135.25 GiB, current 137.84 GiB."
_WORKER = "Exception: WorkerProc initialization failed due to an exception in a background process."


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (_ENDED % -9, "", 4),
        (_ENDED % -15, "ValueError: said before it was killed", 4),
        (_UNKNOWN, "", 4),
        (_UNKNOWN, "ValueError: 500.0 GiB are asked for, 14.69 are there", 2),
        (_ENDED % 1, _MEMORY, 4),
        (_ENDED % 1, _WORKER, 4),
        (_ENDED % 1, "ValueError: 500.0 GiB are asked for, 14.69 are there", 2),
        (_ENDED % 1, "", 2),
        (_ENDED % -11, "", 2),
        ("no such architecture", "", 2),
    ],
)
def test_only_what_may_pass_is_tried_again(error: str, cause: str, code: int) -> None:
    failed = failure("models/small", error, cause)
    assert exit_code(failed) == code
    assert (cause or error) in str(failed)
