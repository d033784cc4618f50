"""docs/phases.md says what the code does: its keys exist, its phases are all of them."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.recipe.phases_section import PHASES, ForwardPhaseSection, PhasesSection, UpdatePhaseSection

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "phases.md").read_text(encoding="utf-8")


def test_every_phase_has_its_row_and_its_keys() -> None:
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)(?:\.NAME)?` \|.*$", PAGE, re.MULTILINE)}
    assert list(rows)[: len(PHASES)] == list(PHASES)
    for phase, field in PhasesSection.model_fields.items():
        assert f"`phases.{phase}" in rows[phase], phase
        assert field.description
    for key in (*ForwardPhaseSection.model_fields, *UpdatePhaseSection.model_fields):
        assert f"`{key}" in PAGE or f".{key}`" in PAGE, key
