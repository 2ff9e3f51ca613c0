"""Forks the engine's processes from one that has imported vLLM; for the CPU only.

An import of vLLM takes ten seconds of a core. vLLM's CPU platform starts the engine core and each worker
as new interpreters, so that three imports follow each other. Here another process imports it at the same
time, and the others are forked from that one, which has no threads. Its environment is that of its start.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Final

MODULES: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "paceline.rollout.engines.vllm.worker",
)
"""What the engine's processes import; what is missing here is imported later, in each of them"""


def start() -> BaseContext:
    """Starts the process that imports vLLM, and does not wait for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    forkserver.ensure_running()
    return context


def use(context: BaseContext) -> None:
    """Has vLLM start the engine core in `context`; it has no switch for that."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: context
