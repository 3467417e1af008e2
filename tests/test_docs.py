"""The comments that document parameters stand where nbdev looks for them."""

import ast
import inspect
import io
import tokenize
from importlib import import_module
from pathlib import Path

import pytest
from fastcore.docments import docments

from spt_nbdev._modidx import d as index

MODULES = [Path(path).stem for path in {file for names in index["syms"].values() for _, file in names.values()}]


def functions(module: str) -> list[tuple[str, object]]:
    names = import_module(f"spt_nbdev.{module}")
    return [(f"{module}.{n}", f) for n in names.__all__ if inspect.isfunction(f := getattr(names, n))]


def comments_by_line(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


ALL = [pair for module in sorted(MODULES) for pair in functions(module)]


@pytest.mark.parametrize(("name", "function"), ALL, ids=[n for n, _ in ALL])
def test_docments_are_the_comments_on_the_same_line(name: str, function: object) -> None:
    source = inspect.getsource(function)
    tree = ast.parse(source).body[0]
    comments = comments_by_line(source)
    found = docments(function, full=True)
    for arg in tree.args.args + tree.args.kwonlyargs:
        assert arg.annotation is not None, f"{name}: {arg.arg} has no type"
        assert (found[arg.arg].docment or None) == comments.get(arg.lineno), f"{name}: {arg.arg}"
    assert tree.returns is not None and ast.get_docstring(tree), f"{name}: no return type or no docstring"
    assert (found["return"].docment or None) == comments.get(tree.returns.lineno, None) or tree.returns.lineno == tree.lineno, f"{name}: return"


def test_a_wrapped_signature_is_noticed() -> None:
    """The fault that this file guards against: a comment that slips to the next parameter."""
    namespace: dict = {}
    code = "def f(\n    a: int\n    | None = None,  # about a\n    b: int = 0,\n) -> None:\n    'd'\n"
    exec(code, namespace)
    comments = comments_by_line(code)
    a, b = ast.parse(code).body[0].args.args
    assert comments.get(a.lineno) is None and comments.get(b.lineno) is None, "so the comment would be lost or slip"
