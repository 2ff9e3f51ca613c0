"""The child's side: moves its pipes out of the user code's reach, and ends with its parent."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

from paceline.service.children import frames
from paceline.service.children.progress import ItemProgress
from paceline.service.process import die_with


def serve(answer: Callable[[BinaryIO, BinaryIO, ItemProgress], None]) -> None:
    """Runs a child: calls `answer` with the stream of requests, that of results, and the page of progress.

    The command line holds the parent's process id, the page's file descriptor and the limit of memory, as
    `ChildProcess` writes it.
    """
    parent, page, memory_bytes = (int(word) for word in sys.argv[1:4])
    die_with(parent, signal.SIGKILL)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # A function that prints must not write between the results; one that reads must not consume requests.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    progress = ItemProgress(page)
    os.close(page)  # the mapping stays
    answer(requests, results, progress)


def write(results: BinaryIO, message: object) -> None:
    """Sends one message to the parent."""
    results.write(frames.encode(message))
    results.flush()
