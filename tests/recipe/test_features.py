"""The feature table says what the code supports: it is read off the code, and docs/architecture.md repeats it."""

import json
from pathlib import Path

from megarl.models import FAMILIES
from tests.megatron import test_golden as test_engine_golden
from tests.recipe.feature_table import features, markdown
from tests.tiny_models import save_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def test_the_page_has_the_table_of_the_code():
    assert markdown(features()) in PAGE, "write what `python -m tests.recipe.feature_table` prints into docs/architecture.md"


def test_every_supported_family_has_a_golden_test(tmp_path):
    tested = set()
    for function in vars(test_engine_golden).values():
        for mark in getattr(function, "pytestmark", []) if callable(function) else []:
            if mark.name == "parametrize" and mark.args[0] == ("family", "tied"):
                tested |= {case.values[0] for case in mark.args[1] if "nightly" not in {mark.name for mark in case.marks}}
    built = [save_tiny_model(tmp_path / name, name) for name in sorted(tested)]
    types = {json.loads((directory / "config.json").read_text())["model_type"] for directory in built}
    assert types == FAMILIES.keys()
