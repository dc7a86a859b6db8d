"""Signatures and docstrings as text, read from the source: the same on every Python."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """A field, property or method of a class."""

    text: str
    doc: str


def constructor_text(name: str, node: ast.ClassDef) -> str:
    """The call that makes a value: of `__init__`, or of a dataclass's fields."""
    made = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    if made is not None:
        return signature_text(made, "cm.", name, keeps_return=False)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return _wrapped(f"cm.{name}", [_unparsed(field) for field in fields if not _is_hidden(field)], "")


def _is_hidden(field: ast.AnnAssign) -> bool:
    return isinstance(field.target, ast.Name) and field.target.id.startswith("_")


def _unparsed(field: ast.AnnAssign) -> str:
    return re.sub(r" = field\(.*\)$", " = ...", ast.unparse(field))


def members_of(node: ast.ClassDef) -> Iterator[Member]:
    """Documented fields, properties and methods that are public."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield Member(ast.unparse(item.target), plain(str(after.value.value)))
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
            is_property = any("property" in ast.unparse(mark) for mark in item.decorator_list)
            yield Member(item.name if is_property else _call(item), " ".join(doc_of(item).split()))


def _call(node: ast.FunctionDef) -> str:
    return f"{node.name}({', '.join(_arguments(node))})"


def signature_text(node: Any, prefix: str, name: str = "", keeps_return: bool = True) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if keeps_return and node.returns is not None else ""
    return _wrapped(f"{prefix}{name or node.name}", _arguments(node), returns)


def _arguments(node: ast.FunctionDef) -> list[str]:
    """Its arguments one by one, without self."""
    given = node.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    pairs = zip(given.args, defaults, strict=True)
    texts = [_argument(*pair) for pair in pairs if pair[0].arg not in ("self", "cls")]
    if given.vararg:
        texts.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        texts.append("*")
    texts += [_argument(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return texts + ([f"**{_argument(given.kwarg, None)}"] if given.kwarg else [])


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    text = arg.arg if arg.annotation is None else f"{arg.arg}: {ast.unparse(arg.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _wrapped(head: str, arguments: list[str], returns: str) -> str:
    line = f"{head}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return f"{head}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def node_of(value: Any) -> Any:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    return node


def doc_of(node: Any) -> str:
    return plain(ast.get_docstring(node))


def plain(text: str | None) -> str:
    """A docstring as Markdown: its paragraphs, each on one line."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
