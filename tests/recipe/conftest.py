"""A folder with models for the recipes of this package's tests."""

from pathlib import Path

import pytest

from tests.recipe_cases import make_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)
