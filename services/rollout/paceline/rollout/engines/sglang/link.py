"""Talks with the processes of an engine's ranks over SGLang's own sockets on this host.

    requests, aborts --> rank 0 --> tokens, as they are drawn
    calls of `scheduler.py`'s methods --> every rank --> a reply of each

Rank 0 passes on to the other ranks what it receives.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import zmq
import zmq.asyncio

from paceline.rollout.engines.answers import GRACE_S, Reply, engine_died, no_answer

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_Result = TypeVar("_Result")


class Link:
    """The processes of an engine, and the sockets to them. Create it in a running event loop.

    Args:
        on_output: called with every message of rank 0 that is not a reply to a call.
    """

    def __init__(self, on_output: Callable[[Any], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-sglang-"))
        self._context = zmq.asyncio.Context()
        self._outputs = self._bound(zmq.PULL, "outputs")
        self._requests = self._bound(zmq.PUSH, "requests")
        self._calls = self._bound(zmq.DEALER, "calls")
        self._calling = asyncio.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._on_output = on_output
        self._reading = asyncio.create_task(self._read())

    def start(
        self, arguments: dict[str, Any], environment: dict[str, str], nccl_port: int, share: float
    ) -> None:
        """Starts a process per rank; `share` is the part of its GPU's memory that each may take."""
        ports = {
            "tokenizer_ipc_name": self._address("outputs"),
            "scheduler_input_ipc_name": self._address("requests"),
            "rpc_ipc_name": self._address("calls"),
            "nccl_port": nccl_port,
            "instance_id": self._folder.name[-12:],
        }
        for rank in range(arguments.get("tp_size", 1)):
            job = {
                "arguments": arguments,
                "environment": environment,
                "ports": ports,
                "rank": rank,
                "gpu_id": rank,
                "share": share,
            }
            child = subprocess.Popen(
                [sys.executable, "-m", "paceline.rollout.engines.sglang.process"],
                stdin=subprocess.PIPE,
                env=os.environ | environment,
            )
            assert child.stdin is not None
            child.stdin.write(json.dumps(job).encode())
            child.stdin.close()
            self._children.append(child)

    @property
    def ended(self) -> list[int]:
        """Exit codes of ranks that have ended."""
        return [code for child in self._children if (code := child.poll()) is not None]

    async def send(self, message: Any) -> None:
        """Sends a message to rank 0.

        Raises:
            DeadlineError: rank 0 has not connected in time.
            PeerLostError: the engine died.
        """
        from sglang.srt.managers.io_struct import msgpack_encode

        await self._unless_ended(self._requests.send(msgpack_encode(message)), "sending a request", GRACE_S)

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Reply]:
        """Calls a method on every rank; returns the replies by rank. Raises as `send` does."""
        from sglang.srt.managers.io_struct import RpcReqInput, msgpack_decode, msgpack_encode

        packed = base64.b64encode(msgpack.packb([method, args])).decode()
        message = msgpack_encode(RpcReqInput(method=method, parameters={"call": packed}))
        async with self._calling:
            answer = await self._unless_ended(self._exchange(message), method, timeout_s + GRACE_S)
        reply = msgpack_decode(answer)
        replies: list[Reply] = msgpack.unpackb(base64.b64decode(reply.message))
        return replies

    async def _exchange(self, message: bytes) -> bytes:
        await self._calls.send(message)  # waits until a rank has connected
        return bytes(await self._calls.recv())

    async def _unless_ended(self, work: Awaitable[_Result], phase: str, seconds: float) -> _Result:
        """Waits for work with the sockets, which do not notice that a process has ended."""
        working = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(seconds):
                while not working.done():
                    await asyncio.wait([working], timeout=_LOOK_S)
                    if not working.done() and self.ended:
                        raise engine_died(codes=self.ended)
        except TimeoutError:
            raise no_answer(phase, seconds) from None
        finally:
            working.cancel()
        return working.result()

    async def _read(self) -> None:
        while True:
            data = await self._outputs.recv()
            from sglang.srt.managers.io_struct import msgpack_decode

            self._on_output(msgpack_decode(data))

    def kill(self) -> None:
        """Kills the processes and closes the sockets. May be repeated."""
        for child in self._children:
            child.kill()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
        self._reading.cancel()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def _bound(self, kind: int, name: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._address(name))
        return socket
