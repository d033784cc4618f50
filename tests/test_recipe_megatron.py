"""`trainer.megatron` passes options on to megatron-core, and `megarl check` knows their names without importing it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from megarl import platform  # noqa: F401  # before megatron.core
from megarl.recipe.foreign_fields import dataclass_fields

CONFIG = "megatron.core.transformer.transformer_config"


@pytest.mark.parametrize("name", ["TransformerConfig", "MLATransformerConfig"])
def test_fields_read_from_source_are_those_of_the_class(name: str) -> None:
    from megatron.core.transformer import transformer_config

    fields = dataclasses.fields(getattr(transformer_config, name))
    assert set(dataclass_fields(CONFIG, name) or {}) == {field.name for field in fields}


def test_reading_fields_imports_nothing() -> None:
    script = (
        "import sys; from megarl.recipe.foreign_fields import dataclass_fields; "
        f"print(dataclass_fields({CONFIG!r}, 'TransformerConfig')['num_layers'], dataclass_fields('absent.x', 'Y'), "
        "sorted({'torch', 'megatron.core'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split(maxsplit=2) == ["int", "None", "[]\n"], done.stderr
