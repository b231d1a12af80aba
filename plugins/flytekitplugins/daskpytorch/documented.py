"""Has `help` say what the fields of a class are. Imports nothing of ours; reads a source only when it is asked."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TypeVar

WIDTH = 96
C = TypeVar("C", bound=type)


def documented(cls: C) -> C:
    """Have a class's `__doc__` list its fields with the docstrings below them, which Python itself forgets."""
    cls.__doc__ = _Documented(cls.__doc__)  # type: ignore[assignment]
    return cls


class _Documented:
    """A class's docstring, which Python asks for what it is."""

    def __init__(self, own: str | None) -> None:
        self._own = inspect.cleandoc(own or "")

    def __get__(self, instance: object, owner: type) -> str:
        fields = dict(chain.from_iterable(map(_fields, reversed(owner.__mro__))))
        if not fields:
            return self._own
        about, *sections = re.split(r"\n\n(?=(?:Raises|Examples):\n)", self._own)
        return "\n\n".join([about, "Attributes:\n" + "\n".join(map(_listed, fields, fields.values())), *sections])


def _listed(name: str, text: str) -> str:
    paragraphs = [textwrap.fill(" ".join(part.split()), WIDTH) for part in f"{name}: {text}".split("\n\n")]
    return textwrap.indent("\n\n".join(paragraphs), "    ").replace("\n    ", "\n        ")


def _fields(cls: type) -> Iterator[tuple[str, str]]:
    """Of this class alone: those of its body, and what its `__init__` sets."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # built in, or there is no source
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (node is tree or node.name == "__init__"):
            yield from _described(node.body)


def _described(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, below in pairwise(statements):
        match statement, below:
            case (
                (
                    ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name))
                    | ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)])
                ),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if not name.startswith("_"):
                yield name, inspect.cleandoc(text)
