"""Reward functions that misbehave, each in one way, when the response says so."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time


def length(response: str, ground_truth: str) -> int:
    return len(response)


def obedient(response: str, ground_truth: str, **extra: object) -> object:
    """Does what the response orders, and else scores 1.0."""
    match response.split(":"):
        case ["hang"]:
            time.sleep(3600)
        case ["hang_once", path]:
            if not os.path.exists(path):
                with open(path, "w") as file:
                    file.write("seen")
                time.sleep(3600)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["hang_with_child"]:
            child = subprocess.Popen(["sleep", "3600"])
            with open(str(extra["pid_file"]), "w") as file:
                file.write(str(child.pid))
            time.sleep(3600)
        case ["exit"]:
            os._exit(3)
        case ["sys_exit"]:
            sys.exit(4)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["memory"]:
            bytearray(1 << 40)
        case ["raise"]:
            raise KeyError("no\nsuch\ncolumn")
        case ["timeout_error"]:
            raise TimeoutError("the judge was slow")
        case ["connection_error"]:
            raise ConnectionRefusedError("the judge is down")
        case ["print"]:
            print("printed by a reward function")
            sys.stdout.flush()
            os.write(1, b"\x05\x00\x00\x00junk!")
            subprocess.run(["echo", "printed by its child"], check=True)
        case ["read"]:
            return float(len(sys.stdin.read()))
        case ["return", what]:
            return RETURNED[what]
        case ["numpy", what]:
            import numpy as np  # here, because it makes the start of every worker slower

            return {"bool": np.bool_(True), "float": np.float32(0.5)}[what]
        case ["pid"]:
            return float(os.getpid())
    return 1.0


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
}


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
