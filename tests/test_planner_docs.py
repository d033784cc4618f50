"""docs/phases.md says what the code does: its example runs, its keys exist, its phases are all of them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from megarl.recipe.recipe import PHASES
from megarl.recipe.sections import ForwardPhaseSection, PhasesSection, UpdatePhaseSection

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "phases.md").read_text(encoding="utf-8")


def test_the_worked_example_prints_what_the_page_shows() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/phases.md", "exec"), {})
    assert printed.getvalue() == shown


def test_every_phase_has_its_row_and_its_keys() -> None:
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.MULTILINE)}
    assert list(rows)[: len(PHASES)] == list(PHASES)
    for phase, field in PhasesSection.model_fields.items():
        assert f"`phases.{phase}" in rows[phase], phase
        assert field.description
    for key in (*ForwardPhaseSection.model_fields, *UpdatePhaseSection.model_fields):
        assert f"`{key}" in PAGE or f".{key}`" in PAGE, key


def test_every_metric_on_the_page_is_written_by_a_run() -> None:
    """Of the table and text on what a run proves; the run's own tests read the values."""
    sources = "".join(file.read_text(encoding="utf-8") for file in (Path(__file__).parents[1] / "megarl").rglob("*.py"))
    section = PAGE.split("## What a run proves")[1].split("## ")[0]
    names = set(re.findall(r"`(?:rollout/)?([a-z_]+)(?: \.\.\.[^`]*)?`", section)) - {"metrics"}
    assert len(names) >= 12
    for name in names:
        stem = name.removesuffix("_p")
        assert f'"{stem}' in sources or f"/{stem}" in sources, name
