"""Finds the root cause of an engine's end in its processes' logs, because vLLM's own error has none."""

from __future__ import annotations

import os
import re
import stat
import sys
from typing import Final

_MOST_BYTES: Final = 1_000_000
_MOST_CHARACTERS: Final = 400
_PROCESS: Final = r"^\((?:EngineCore|[A-Za-z]*Worker)\S* pid=\d+\) ERROR [^\]]*\] "
_KILLED: Final = re.compile(r"core proc\(s\): \{.*'[^']*': -(9|15)\b")
"""vLLM's message for processes that SIGKILL or SIGTERM ended, as the kernel does if memory runs out"""
_UNKNOWN: Final = "core proc(s): {}"
"""vLLM's message for a process whose pipe is closed but whose exit code is not known yet"""
_PASSING: Final = (
    # Another process on the GPU freed memory while vLLM measured how much is free.
    "Error in memory profiling",
    # The core reports a killed worker; a worker that failed by itself would have logged its exception before.
    "WorkerProc initialization failed",
)
_LINE: Final = re.compile(_PROCESS + r"(?P<text>[A-Za-z_.]*(?:Error|Exception): .+)$", re.MULTILINE)


def may_pass(error: str, cause: str) -> bool:
    """Returns whether the same start may succeed the next time.

    Args:
        error: message of the error that vLLM raised.
        cause: result of `ErrorOutput.root_cause`.
    """
    if _UNKNOWN in error and not cause:
        return True  # a process that failed by itself would have logged why
    return bool(_KILLED.search(error)) or any(text in (cause or error) for text in _PASSING)


class ErrorOutput:
    """Reads standard error as written from now on, if it is a file. Create it before the engine starts."""

    def __init__(self) -> None:
        self._start = os.fstat(sys.stderr.fileno()).st_size if self._is_file() else 0

    def root_cause(self) -> str:
        """Returns the first exception that a process of the engine has logged, or "" if it is not known."""
        if not self._is_file():
            return ""
        with open(f"/proc/self/fd/{sys.stderr.fileno()}", "rb") as file:
            # After a long run, the cause is at the end of the output.
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            return first_exception(file.read(_MOST_BYTES).decode("utf-8", errors="replace"))

    def _is_file(self) -> bool:
        return stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)


def first_exception(text: str) -> str:
    """Returns the first exception in log lines of the engine's processes; the workers' precede the core's."""
    match = _LINE.search(text)
    return match["text"][:_MOST_CHARACTERS].rstrip() if match else ""
