"""Every wait has a deadline, or stands in tests/support/waits.py with the reason why it needs none.

A wait is what may last for ever if the other side does nothing: a gRPC call, an event, a condition, a queue,
a lock, a task, a child process, a torch store or process group, a Redis connection. A deadline is a timeout
among the arguments, or an enclosing `asyncio.timeout`. Collectives wait as long as their group's timeout, so
every group must be made with one.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from support import source
from support.waits import NEEDLESS

_SUBPROCESS = {"run", "call", "check_call", "check_output"}
_GROUPS = {"TCPStore", "init_process_group", "new_group", "ProcessGroupGloo", "ProcessGroupNCCL"}
_CONNECTIONS = {"from_url", "create_connection", "open_connection"}
_AWAITED = {"get", "acquire", "readexactly", "readline"}


@cache
def _rpcs() -> frozenset[str]:
    """Names of all RPCs, from the generated stubs."""
    stubs = (source.ROOT / "src" / "paceline" / "rpc" / "v1").glob("*_pb2_grpc.py")
    return frozenset(
        name for path in stubs for name in re.findall(r"self\.(\w+) = channel\.", path.read_text("utf-8"))
    )


class _Waits(ast.NodeVisitor):
    """Collects (qualified name, expression) of the waits of a module that have no deadline."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []
        self._names: list[str] = []
        self._bounded = 0
        self._awaited: set[ast.expr] = set()
        self._called: set[ast.expr] = set()

    # --- where we are

    def _visit_scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        bounded, self._bounded = self._bounded, 0
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        self._bounded = bounded

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit_scope

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        bounded = any("asyncio.timeout" in ast.unparse(item.context_expr) for item in node.items)
        self._bounded += bounded
        self.generic_visit(node)
        self._bounded -= bounded

    # --- what waits

    def visit_Await(self, node: ast.Await) -> None:
        self._awaited.add(node.value)
        if isinstance(node.value, ast.Name | ast.Attribute):
            self._note(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_wait_for(node):
            # Bounded by the call around it.
            self._bounded += 1
            self.generic_visit(node)
            self._bounded -= 1
            return
        if _is_wait(node, awaited=node in self._awaited) and not _has_timeout(node):
            self._note(node)
        for argument in node.args:
            if _is_rpc(argument):
                self._called.add(argument)
                if not _has_timeout(node):
                    self._note(node)
        if _is_rpc(node.func):
            self._called.add(node.func)
            if not _has_timeout(node):
                self._note(node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_rpc(node) and node not in self._called:
            self._note(node)
        self.generic_visit(node)

    def _is_wait_for(self, node: ast.Call) -> bool:
        return ast.unparse(node.func) == "asyncio.wait_for" and (_has_timeout(node) or len(node.args) > 1)

    def _note(self, node: ast.expr) -> None:
        if not self._bounded:
            text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            self.waits.append((".".join(self._names), text))


def _is_rpc(node: ast.expr) -> bool:
    """A method of a stub; a servicer's own methods are definitions, not attributes."""
    return isinstance(node, ast.Attribute) and node.attr in _rpcs() and isinstance(node.ctx, ast.Load)


def _is_wait(node: ast.Call, *, awaited: bool) -> bool:
    function = ast.unparse(node.func)
    name = function.rpartition(".")[2]
    if function == "asyncio.wait" or name in _GROUPS | _CONNECTIONS:
        return True
    if name in _SUBPROCESS and function.startswith("subprocess."):
        return True
    if name in ("wait", "wait_for", "communicate") and isinstance(node.func, ast.Attribute):
        return len(node.args) < (2 if name == "wait_for" or "store" in function else 1)
    if name == "join" and isinstance(node.func, ast.Attribute) and not node.args:
        return True
    return name in _AWAITED and awaited


def _has_timeout(node: ast.Call) -> bool:
    return any(
        keyword.arg is not None
        and "timeout" in keyword.arg
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
        for keyword in node.keywords
    )


@cache
def _waits() -> tuple[str, ...]:
    waits = []
    for name, path in source.modules().items():
        visitor = _Waits()
        visitor.visit(source.tree(path))
        waits += [f"{name}:{where}: {what}" for where, what in visitor.waits]
    return tuple(waits)


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    missing = sorted(set(_waits()) - NEEDLESS.keys())
    assert missing == [], "give these a timeout, or a reason in tests/support/waits.py"


def test_every_reason_is_of_a_wait_that_exists() -> None:
    assert sorted(NEEDLESS.keys() - set(_waits())) == []
    assert [wait for wait, reason in NEEDLESS.items() if len(reason) < 15] == []


@pytest.mark.parametrize(
    "code",
    [
        "await self._stub.TrainStep(request)",
        "await call(self._stub.TrainStep, request, phase='LEARN')",
        "method = self._stub.TrainStep",
        "await event.wait()",
        "await asyncio.wait([task])",
        "await asyncio.wait([task], timeout=None)",
        "await condition.wait_for(lambda: ready)",
        "await queue.get()",
        "await lock.acquire()",
        "await future",
        "thread.join()",
        "process.wait()",
        "subprocess.run(['ls'])",
        "store.wait(['key'])",
        "dist.new_group([0])",
        "redis.Redis.from_url(url)",
    ],
)
def test_a_wait_without_a_deadline_is_seen(code: str) -> None:
    visitor = _Waits()
    visitor.visit(ast.parse(f"async def f():\n    {code}\n"))
    assert len(visitor.waits) == 1


@pytest.mark.parametrize(
    "code",
    [
        "await call(self._stub.TrainStep, request, timeout_s=3.0)",
        "await self._stub.TrainStep(request, timeout=3.0)",
        "await self._call(member, self._stub.TrainStep, request, timeout_s=3.0)",
        "await asyncio.wait([task], timeout=2.0)",
        "await asyncio.wait_for(event.wait(), 2.0)",
        "process.wait(3.0)",
        "subprocess.run(['ls'], timeout=2.0)",
        "store.wait(['key'], timedelta(seconds=2))",
        "dist.new_group([0], timeout=timeout)",
        "', '.join(words)",
        "mapping.get('key')",
    ],
)
def test_a_wait_with_a_deadline_is_passed(code: str) -> None:
    visitor = _Waits()
    visitor.visit(ast.parse(f"async def f():\n    {code}\n"))
    visitor.visit(
        ast.parse("async def f():\n    async with asyncio.timeout(2.0):\n        await event.wait()\n")
    )
    assert visitor.waits == []
