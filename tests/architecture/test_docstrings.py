"""Public docstrings: a first sentence that says more than the name, and sections that can be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from support import source

SHORTEST = 5
Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# What a sentence begins with that goes on from the name above it.
_GOES_ON = frozenset(
    {
        "Also",
        "As",
        "At",
        "By",
        "For",
        "From",
        "In",
        "It",
        "Its",
        "Like",
        "Of",
        "On",
        "See",
        "That",
        "Those",
        "To",
        "With",
    }
)
# `Args: ranks: the group. ...`: a section that was wrapped as if it were prose.
_WRAPPED_SECTION = re.compile(r"^ *(Args|Attributes|Raises|Returns|Yields): +\S", re.MULTILINE)


def _public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Documented]]:
    for child in node.body:
        if isinstance(child, Documented) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from _public(child, f"{prefix}{child.name}.")


def _everything() -> Iterator[tuple[str, Documented]]:
    """Every public class and function, by file, line and name."""
    for path in source.modules().values():
        for name, node in _public(source.tree(path)):
            yield f"{path.relative_to(source.ROOT)}:{node.lineno} {name}", node


def _is_property(node: Documented) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _first_sentence(docstring: str) -> str:
    return re.split(r"\.\s|\n\n", docstring, maxsplit=1)[0]


def test_a_first_sentence_says_something() -> None:
    """Of five words at least."""
    short = [
        f"{place}: {sentence}"
        for place, node in _everything()
        if (docstring := ast.get_docstring(node))
        and len((sentence := _first_sentence(docstring)).split()) < SHORTEST
    ]
    assert short == [], "a first sentence has a verb and reads without the name above it"


def test_a_first_sentence_reads_without_the_name() -> None:
    """`From the checkpoint.` is no sentence, and neither is `That of the policy.`"""
    fragments = [
        f"{place}: {docstring.splitlines()[0]}"
        for place, node in _everything()
        if not _is_property(node)
        and (docstring := ast.get_docstring(node))
        and docstring.split()[0].rstrip(":,") in _GOES_ON
    ]
    assert fragments == []


def test_every_entry_of_a_section_has_its_line() -> None:
    wrapped = [
        f"{place}: {match.group().strip()}"
        for place, node in _everything()
        for match in _WRAPPED_SECTION.finditer(ast.get_docstring(node) or "")
    ]
    assert wrapped == []


def test_arguments_that_are_described_exist() -> None:
    """Of a function its own, of a class those of `__init__` or its fields."""
    described = [(place, node, name) for place, node in _everything() for name in _described(node)]
    assert len(described) > 500, "the sections were not found"
    assert [f"{place}: {name}" for place, node, name in described if name not in _parameters(node)] == []


def _described(node: Documented) -> Iterator[str]:
    """The names in the section Args; one line may describe several: `host, port: where to listen`."""
    section = re.search(r"^Args:\n((?: +\S.*\n?|\n(?= ))+)", ast.get_docstring(node) or "", re.MULTILINE)
    for line in section.group(1).splitlines() if section else ():
        if entry := re.match(r" {4}(\S[*\w, ]*?):", line):
            yield from (name.strip(" *") for name in entry.group(1).split(","))


def _parameters(node: Documented) -> set[str]:
    if not isinstance(node, ast.ClassDef):
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
        return {argument.arg for argument in every}
    named = {
        n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return named.union(*map(_parameters, made))
