"""The comments that document parameters stand where nbdev looks for them."""

import ast
import inspect
import io
import tokenize
from collections import Counter
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


def faults(function: object) -> list[str]:
    """Parameters and returns without a type, or whose documentation is not the comment on their own line."""
    source = inspect.getsource(function)
    tree = ast.parse(source).body[0]
    comments, found = comments_by_line(source), docments(function, full=True)
    bad = [a.arg for a in tree.args.args + tree.args.kwonlyargs if a.annotation is None or (found[a.arg].docment or None) != comments.get(a.lineno)]
    if tree.returns is None or (tree.returns.lineno != tree.lineno and (found["return"].docment or None) != comments.get(tree.returns.lineno)):
        bad.append("return")
    return bad if ast.get_docstring(tree) else [*bad, "docstring"]


@pytest.mark.parametrize(("name", "function"), ALL, ids=[n for n, _ in ALL])
def test_docments_are_the_comments_on_the_same_line(name: str, function: object) -> None:
    assert faults(function) == []


def test_a_wrapped_signature_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this file guards against: a formatter moves a comment, and it slips to the next parameter."""
    (tmp_path / "wrapped.py").write_text("def f(\n    a: int\n    | None = None,  # about a\n    b: int = 0,\n) -> None:\n    'd'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert faults(import_module("wrapped").f) == ["b"]


def test_a_name_is_exported_once(root: Path) -> None:
    """Links from prose to documentation go by name; `planned_runs` and `FINDINGS` are what each page calls the list of its runs and of what it asks of them."""
    homes = Counter(
        name for path in root.glob("spt_nbdev/*.py") for name in getattr(import_module(f"spt_nbdev.{path.stem}"), "__all__", ()) if path.stem != "_modidx"
    )
    assert {name for name, n in homes.items() if n > 1} <= {"planned_runs", "FINDINGS"}
