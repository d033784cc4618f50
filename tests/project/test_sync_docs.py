"""docs/weight-sync.md says what the code does: its example runs, its keys are those of the recipe."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from megarl.recipe.weight_sync_section import WeightSyncSection

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "weight-sync.md").read_text(encoding="utf-8")


def test_the_worked_example_prints_what_the_page_shows() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/weight-sync.md", "exec"), {})
    assert printed.getvalue() == shown


def test_the_page_has_every_key() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(WeightSyncSection.model_fields)
