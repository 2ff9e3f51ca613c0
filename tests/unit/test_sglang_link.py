"""The link to SGLang's processes when they end, or never connect."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")

from paceline.core.errors import DeadlineError, PeerLostError
from paceline.rollout.engines.sglang import link as module
from paceline.rollout.engines.sglang.link import Link

STUCK_S = 60.0
"""Far longer than a dead process takes to be noticed, and shorter than a test may run"""


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the link imports of SGLang."""
    messages = ModuleType("io_struct")
    messages.RpcReqInput = SimpleNamespace  # type: ignore[attr-defined]
    messages.msgpack_encode = lambda message: b"a message"  # type: ignore[attr-defined]
    messages.msgpack_decode = lambda data: data  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)


@pytest.fixture
async def link() -> Any:
    made = Link(lambda output: None)
    yield made
    made.kill()


def child(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program])


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = child("import time; time.sleep(600)")
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("way", ["call", "send"])
async def test_a_process_that_ends_before_it_connects_is_noticed(link: Link, way: str) -> None:
    """As with arguments that SGLang refuses: nobody reads the socket, so a plain send would wait for ever."""
    link._children = [child("raise SystemExit(3)")]
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"exit codes \[3\]"):
        if way == "call":
            await link.call("paceline_facts", timeout_s=10 * STUCK_S)
        else:
            await link.send("a request")
    assert time.monotonic() - began < STUCK_S


@pytest.mark.parametrize("way", ["call", "send"])
async def test_a_process_that_does_not_connect_is_given_up_at_the_deadline(
    link: Link, way: str, sleeping: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    link._children = [sleeping]
    with pytest.raises(DeadlineError, match="its processes hang"):
        if way == "call":
            await link.call("paceline_facts", timeout_s=0.1)
        else:
            await link.send("a request")
