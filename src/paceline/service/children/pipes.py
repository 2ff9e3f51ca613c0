"""The child's side: moves its pipes out of the user code's reach, and ends with its parent."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError
from paceline.service.children import frames
from paceline.service.children.progress import ItemProgress
from paceline.service.process import die_with

Begin = Callable[[Any, BinaryIO, ItemProgress], tuple[object, Callable[[Any], None]]]
"""Prepares a child, given its setup, the stream of results and the page of progress.

Returns its description and the function that handles a request; raises ConfigError if the setup is unusable.
"""


def serve(begin: Begin) -> None:
    """Runs a child: says "ready" with its description, or "refused", and handles requests until they end.

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
    setup = frames.read(requests)
    if setup is None:
        return
    try:
        description, handle = begin(setup, results, progress)
    except ConfigError as error:
        write(results, ["refused", str(error)])
        return
    write(results, ["ready", description])
    while (request := frames.read(requests)) is not None:
        try:
            handle(request)
        except MemoryError:
            os._exit(frames.OUT_OF_MEMORY_EXIT)  # the rest of the process cannot be relied on


def write(results: BinaryIO, message: object) -> None:
    """Sends one message to the parent."""
    results.write(frames.encode(message))
    results.flush()
