"""docs/weight-sync.md has every key of the recipe section, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.recipe.weight_sync_section import WeightSyncSection

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "weight-sync.md").read_text(encoding="utf-8")


def test_the_page_has_every_key() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(WeightSyncSection.model_fields)
