"""The feature table says what the code supports: it is read off the code, and docs/features.md repeats it."""

import json
from pathlib import Path

from typer.testing import CliRunner

from megarl.cli import app
from megarl.models import FAMILIES
from megarl.recipe.feature_table import features, markdown
from megarl.recipe.layout_section import LayoutSection
from megarl.recipe.role_sections import ActorSection
from tests.megatron import test_golden as test_engine_golden
from tests.tiny_models import save_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "features.md").read_text()


def test_the_page_has_the_table_that_check_prints():
    assert markdown(features()) in PAGE, (
        "write the table that megarl.recipe.feature_table.markdown(features()) gives into docs/features.md"
    )
    done = CliRunner().invoke(app, ["check", "--features"])
    assert done.exit_code == 0
    shown = " ".join(done.stdout.split())
    for row in features():
        for word in (row.area, row.key, *row.values.split(", ")):
            assert word.replace("`", "").replace("**", "").split(" ")[0] in shown, row


def test_every_supported_family_has_a_golden_test(tmp_path):
    tested = set()
    for function in vars(test_engine_golden).values():
        for mark in getattr(function, "pytestmark", []) if callable(function) else []:
            if mark.name == "parametrize" and mark.args[0] == ("family", "tied"):
                tested |= {case.values[0] for case in mark.args[1] if "nightly" not in {mark.name for mark in case.marks}}
    built = [save_tiny_model(tmp_path / name, name) for name in sorted(tested)]
    types = {json.loads((directory / "config.json").read_text())["model_type"] for directory in built}
    assert types == FAMILIES.keys()


def test_the_table_has_every_layout_key_and_every_key_of_a_role():
    rows = {row.key: row.values for row in features()}
    assert all(f"`{key}`" in rows["ROLE.layout"] for key in LayoutSection.model_fields)
    assert rows["rollout"].startswith("`tensor`, `pipeline`, `data`, `expert_parallel`")
    assert {f"actor.{key}" for key in ActorSection.model_fields} - rows.keys() == {"actor.layout"}
    assert rows["trainer.precision"].startswith("`fp32`, `bf16`")


def test_check_without_a_recipe_says_what_it_takes():
    done = CliRunner().invoke(app, ["check"])
    assert done.exit_code == 2 and "--features" in done.output
