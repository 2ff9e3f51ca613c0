"""Checks the environment that rollout servers start from, if it is not this one (`rollout.python`)."""

from __future__ import annotations

import json
import subprocess

from paceline.core.errors import EnvironmentLackError
from paceline.engines.facts import EngineFacts
from paceline.service.packages import version

_LIMIT_S = 60.0
_MODULES = ("paceline.rollout", "grpc", "msgpack", "torch", "transformers")

# Runs in the other environment; finds packages without importing them, which takes seconds.
_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, sys
def is_found(name):
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
try:
    version = metadata.version("paceline")
except metadata.PackageNotFoundError:
    version = None
lacking = [name for name in json.loads(sys.argv[1]) if not is_found(name)]
print(json.dumps({"lacking": lacking, "version": version}))
"""


def require_engine(python: str, facts: EngineFacts) -> None:
    """Checks that an interpreter's environment has a rollout server and the engine.

    Args:
        python: the interpreter, as in `rollout.python`.

    Raises:
        EnvironmentLackError: it does not start, or its environment lacks packages or this version of
            Paceline.
    """
    command = [python, "-c", _QUESTION, json.dumps([*_MODULES, facts.package])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except OSError as error:
        raise EnvironmentLackError(
            f"rollout.python={python} does not start ({error.strerror}): write the path of an interpreter, "
            "such as /path/to/venv/bin/python"
        ) from error
    except subprocess.TimeoutExpired:
        raise EnvironmentLackError(
            f"rollout.python={python} gave no answer within {_LIMIT_S:.0f} s: the machine is too busy, or it "
            "is not a Python interpreter"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentLackError(
            f"rollout.python={python} is not a working Python interpreter (exit code {done.returncode}): "
            f"{said}"
        ) from None
    if answer["lacking"]:
        raise EnvironmentLackError(
            f"rollout.python={python} has no {', '.join(answer['lacking'])}: install Paceline with its extra "
            f"for {facts.title} there (docs/engines.md), or correct rollout.python"
        )
    own = version("paceline")
    if own and answer["version"] and answer["version"] != own:
        raise EnvironmentLackError(
            f"rollout.python={python} has Paceline {answer['version']}, this command {own}; install the same "
            "version in both"
        )
