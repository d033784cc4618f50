"""What catches everything says why: else it hides what only a bug can raise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BROAD = {"Exception", "BaseException"}


def unexplained(source: str) -> Iterator[int]:
    """Lines of a module that catch or suppress everything, and have no comment."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            caught = list(node.args)
        else:
            continue
        broad = any(one is None or ast.unparse(one).rpartition(".")[2] in BROAD for one in caught)
        if broad and "#" not in lines[node.lineno - 1]:
            yield node.lineno


def test_whatever_catches_everything_says_why() -> None:
    found = [f"{path}:{line}" for path in sorted(ROOT.glob("megarl/**/*.py")) for line in unexplained(path.read_text())]
    assert not found, "narrow these, or say in a comment on the line why all must be caught"
