"""Imports go downwards: a room imports rooms of its own floor and of lower ones. What catches everything says why: else it
hides what only a bug can raise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "cli": 3, "trainer": 3, "build": 3, "__main__": 3,
    "megatron": 2, "rollout": 2, "weight_sync": 2, "reward": 2, "cluster": 2,
    "models": 1, "data": 1, "telemetry": 1, "platform": 1,
    "recipe": 0, "schedule": 0, "algorithm": 0, "planner": 0,
}  # fmt: skip
VERSION = "megarl.__version__"
# The layers of `models` are on floor 1; what it says of a family needs no torch, and the recipe and the planner read it.
LAYERS = {"attention", "latent_attention", "rotary", "gemma", "layers"}


def floor_of(module: str) -> int:
    """Of a dotted name below `megarl`."""
    room, _, rest = module.partition(".")
    return 0 if room == "models" and rest.partition(".")[0] not in LAYERS else FLOORS[room]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("megarl.") for name in names if name.startswith("megarl.") and name != VERSION)


def test_imports_go_downwards():
    violations = []
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "megarl").with_suffix("").parts)
        if module == "__init__":
            continue
        for name in imported(ast.parse(path.read_text())):
            if floor_of(name) > floor_of(module):
                violations.append(f"{module} -> {name}")
    assert violations == []


def test_rooms_are_those_of_the_design():
    rooms = {path.name for path in (ROOT / "megarl").iterdir() if (path / "__init__.py").exists()}
    assert rooms == {room for room in FLOORS if not (ROOT / "megarl" / f"{room}.py").exists()}


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
        broad = any(caught_type is None or ast.unparse(caught_type).rpartition(".")[2] in BROAD for caught_type in caught)
        if broad and "#" not in lines[node.lineno - 1]:
            yield node.lineno


def test_whatever_catches_everything_says_why() -> None:
    violations = [f"{path}:{line}" for path in sorted(ROOT.glob("megarl/**/*.py")) for line in unexplained(path.read_text())]
    assert not violations, "narrow these, or say in a comment on the line why all must be caught"
