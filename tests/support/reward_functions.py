"""Reward functions that misbehave, each in one way, when the response orders it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable

import msgpack

FOREVER_S = 3600.0

RETURNED: dict[str, object] = {
    "nan": math.nan,
    "inf": -math.inf,
    "huge": 10**400,
    "str": "1.0",
    "none": None,
    "bool": True,
    "list": [1.0],
    "empty_dict": {},
    "no_score": {"length": 1.0},
    "bad_component": {"score": 1.0, "note": "fine"},
    "nan_component": {"score": 1.0, "share": math.nan},
    "dict": {"score": 0.5, "length": 3, "share": 0.25},
    "reward_dict": {"reward": 0.25},
    "int": 2,
    "big": 1e308,
    "surrogate_key": {"score": 1.0, "\udc80": 2.0},
}

RAISED: dict[str, BaseException] = {
    "raise": KeyError("no\nsuch\ncolumn"),
    "timeout_error": TimeoutError("the judge was slow"),
    "connection_error": ConnectionRefusedError("the judge is down"),
    "sys_exit": SystemExit(4),
    "surrogate": ValueError("half \ud83d of a pair"),
}


def length(response: str, ground_truth: str) -> int:
    return len(response)


def obedient(response: str, ground_truth: str, **extra: object) -> object:
    """Does what the response orders ("sleep:0.2", "exit"); scores 1.0 where it orders nothing."""
    order, _, argument = response.partition(":")
    if order in RAISED:
        raise RAISED[order]
    if order not in ORDERS:
        return 1.0
    return ORDERS[order](argument, extra)


def _hang(argument: str, extra: dict[str, object]) -> object:
    time.sleep(FOREVER_S)
    return 1.0


def _hang_once(path: str, extra: dict[str, object]) -> object:
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write("seen")
        time.sleep(FOREVER_S)
    return 1.0


def _sleep(seconds: str, extra: dict[str, object]) -> object:
    time.sleep(float(seconds))
    return 1.0


def _hang_with_child(argument: str, extra: dict[str, object]) -> object:
    child = subprocess.Popen(["sleep", "3600"])
    with open(str(extra["pid_file"]), "w") as file:
        file.write(str(child.pid))
    time.sleep(FOREVER_S)
    return 1.0


def _segfault(argument: str, extra: dict[str, object]) -> object:
    return ctypes.string_at(0)


def _memory(argument: str, extra: dict[str, object]) -> object:
    limit_bytes = 4 * 1024**3
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    bytearray(2 * limit_bytes)
    return 1.0


def _print(argument: str, extra: dict[str, object]) -> object:
    print("printed by a reward function")
    sys.stdout.flush()
    os.write(1, b"\x05\x00\x00\x00junk!")
    subprocess.run(["echo", "printed by its child"], check=True)
    return 1.0


def _numpy(name: str, extra: dict[str, object]) -> object:
    import numpy as np  # here, because it makes the start of every process slower

    return {"bool": np.bool_(True), "float": np.float32(0.5)}[name]


def _fork(argument: str, extra: dict[str, object]) -> object:
    return 1.0 if os.fork() else 0.5


def _recurse(argument: str, extra: dict[str, object]) -> object:
    return _recurse(argument, extra)


class _Odd(dict[object, object]):
    """A dict whose methods raise."""

    def __contains__(self, key: object) -> bool:
        raise RuntimeError("odd \ud800")


class _Shy:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def _junk(argument: str, extra: dict[str, object]) -> object:
    payload = {"list": b"\xc0", "key": b"\x91\x81\x90\x01", "row": b"\x91\x91\x01"}[argument]
    for number in range(3, 64):  # one of these is the pipe of the results
        try:
            os.write(number, len(payload).to_bytes(4, "little") + payload)
        except OSError:
            continue
    return 1.0


def _eat(argument: str, extra: dict[str, object]) -> object:
    return float(len(bytearray(10 * 1024**3)))


def _double_fork(argument: str, extra: dict[str, object]) -> object:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(str(extra["pid_file"]), "w") as file:
                file.write(str(os.getpid()))
            time.sleep(FOREVER_S)
        os._exit(0)
    while argument == "hang":
        time.sleep(1)
    time.sleep(0.3)
    os._exit(1)


def _endless(argument: str, extra: dict[str, object]) -> object:
    while True:
        print("x" * 10_000)


def _close(argument: str, extra: dict[str, object]) -> object:
    os.closerange(0, 256)
    return 1.0


def _forge(what: str, extra: dict[str, object]) -> object:
    """Writes a row of results, or a time, as only the process's own code should."""
    value = {"inf": math.inf, "nan": math.nan, "past": -1.0}.get(what, 0.0)
    frame = msgpack.packb(
        {
            "int": 7,
            "maps": [[[{}] * 1000] * 300],
        }.get(what, [[1, value, [1.0, {}, None, ""]]])
    )
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(number).st_mode):
                continue
            os.write(number, len(frame).to_bytes(4, "little") + frame)
    time.sleep(FOREVER_S)
    return 1.0


def _future(argument: str, extra: dict[str, object]) -> object:
    """Notes that it began in the future, and hangs."""
    for referrer in gc.get_objects():
        if type(referrer).__name__ == "Progress":
            number, _ = referrer.read()
            referrer.note(number, time.monotonic() + 1e6)
    time.sleep(FOREVER_S)
    return 1.0


def _environment(name: str, extra: dict[str, object]) -> object:
    return float(name in os.environ)


ORDERS: dict[str, Callable[[str, dict[str, object]], object]] = {
    "hang": _hang,
    "hang_once": _hang_once,
    "hang_with_child": _hang_with_child,
    "sleep": _sleep,
    "exit": lambda argument, extra: os._exit(3),
    "segfault": _segfault,
    "memory": _memory,
    "print": _print,
    "read": lambda argument, extra: float(len(sys.stdin.read())),
    "return": lambda name, extra: RETURNED[name],
    "numpy": _numpy,
    "fork": _fork,
    "recurse": _recurse,
    "junk": _junk,
    "eat": _eat,
    "double_fork": _double_fork,
    "endless": _endless,
    "close": _close,
    "forge": _forge,
    "future": _future,
    "environment": _environment,
    "keys": lambda argument, extra: {"score": 1.0, **{str(n): 0.0 for n in range(100_000)}},
    "kill": lambda argument, extra: os.kill(0, signal.SIGKILL),
    "pid": lambda argument, extra: float(os.getpid()),
}

RETURNED.update({"odd_dict": _Odd(score=1.0), "shy_key": {"score": 1.0, _Shy(): 2.0}, "shy": _Shy()})


def raises_its_arguments(response: str, ground_truth: str, *, c: object) -> float:
    raise ValueError(f"{ground_truth} {c!r}")


def tells_fields(response: str, ground_truth: str, *, prompt: str, data_source: str, level: int = 0) -> float:
    return float(f"{len(prompt)}{len(data_source)}{level}")


def needs_field(response: str, ground_truth: str, *, difficulty: float) -> float:
    return difficulty


async def is_async(response: str, ground_truth: str) -> float:
    return 1.0


def too_few(response: str) -> float:
    return 1.0


class Judge:
    def __call__(self, response: str, ground_truth: str) -> float:
        return 0.75


judge = Judge()
not_callable = 3


def length_or_error(response: str, ground_truth: str) -> float:
    """The number of characters; `bad` has none."""
    if response == "bad":
        raise KeyError("bad")
    return float(len(response))
