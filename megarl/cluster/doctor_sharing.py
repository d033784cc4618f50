"""Whether all nodes see the run directory of the first one: it leaves a file there, and the others look for it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.doctor_finding import Finding, fail, ok


@dataclass(frozen=True)
class Token:
    """A file with this name, in the directory so many `levels` above the run directory. Nobody has looked for the name
    before, so that no cache of a network file system says that it is not there."""

    name: str
    levels: int


@contextmanager
def leave_token(run_dir: Path) -> Iterator[Token | None]:
    """A token in the run directory, or in the nearest one above it that exists, where it would be made. None where no file
    can be written, which is a finding of its own."""
    above = [run_dir.absolute(), *run_dir.absolute().parents]
    levels = next(level for level, directory in enumerate(above) if directory.exists())
    token = Token(f".megarl-doctor-{secrets.token_hex(16)}", levels)
    file = above[levels] / token.name
    try:
        file.touch(exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield token
    finally:
        file.unlink(missing_ok=True)


def sees(token: Token, run_dir: Path) -> bool:
    """Whether the token is where this node has the directory."""
    above = [run_dir.absolute(), *run_dir.absolute().parents]
    return token.levels < len(above) and (above[token.levels] / token.name).is_file()


def judge(seen: Mapping[str, bool], run_dir: Path) -> Finding:
    """`seen`: by the name of a node, whether it saw the token of the first one."""
    blind = [name for name, there in seen.items() if not there]
    if not blind:
        return ok("shared run directory", f"{run_dir.absolute()} is the same on all nodes that came")
    fix = "give run.dir a place on a file system that all nodes share, under one path; a container must have it mounted"
    found = f"{', '.join(blind)} does not see what node 0 writes into {run_dir.absolute()}: checkpoints would be torn apart"
    return fail("shared run directory", found, fix)
