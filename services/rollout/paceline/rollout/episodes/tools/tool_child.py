"""A child process of a tool pool, `python -m paceline.rollout.episodes.tools.tool_child`.

In:  the references of the functions, then calls: [name, arguments].
Out: first "ready" with the tools' descriptions, or "refused"; then [is ok, text] per call.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import ToolSpec
from paceline.core.text import one_line
from paceline.core.user_functions.tool_function import argument_problem, describe_tool, result_text
from paceline.core.user_functions.user_function import find_function
from paceline.service.children import pipes
from paceline.service.children.progress import ItemProgress

MAX_RESULT_CHARS = 1_000_000
"""A longer result is cut off before it leaves the process."""


def _load(references: list[str]) -> tuple[dict[str, Callable[..., object]], dict[str, ToolSpec]]:
    functions: dict[str, Callable[..., object]] = {}
    specs: dict[str, ToolSpec] = {}
    for reference in references:
        place, _, name = reference.rpartition(":")
        if not place or not name:
            raise ConfigError(f"tool {reference!r}: write module:function, or path/to/file.py:function")
        function: Any = find_function(reference, "tool")
        spec = describe_tool(reference, function)
        if spec.name in specs:
            raise ConfigError(f"rollout.tools names two tools {spec.name!r}: give one another name")
        functions[spec.name], specs[spec.name] = function, spec
    return functions, specs


def _begin(setup: Any, results: BinaryIO, progress: ItemProgress) -> tuple[object, Callable[[Any], None]]:
    functions, specs = _load(setup)

    def answer(call: Any) -> None:
        name, arguments = call
        pipes.write(results, _answer(functions[name], specs[name], arguments))

    return [dataclasses.asdict(spec) for spec in specs.values()], answer


def _answer(function: Callable[..., object], spec: ToolSpec, arguments: Mapping[str, object]) -> list[object]:
    problem = argument_problem(spec, arguments)
    if problem:
        return [False, problem]
    pid = os.getpid()
    try:
        text = result_text(function(**arguments))
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001  user code: what it raises is the call's answer
        return [False, one_line(f"{type(error).__name__}: {error}")]
    finally:
        if os.getpid() != pid:
            os._exit(0)  # a copy that the function forked must not write results
    return [True, text if len(text) <= MAX_RESULT_CHARS else text[:MAX_RESULT_CHARS]]


if __name__ == "__main__":
    pipes.serve(_begin)
