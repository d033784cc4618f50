"""A second preparation of the model does nothing, and a directory with other files is never changed."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "launch" / "prepare_smollm2.py"


def prepare(directory):
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(directory)], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_prepared_directory_stays_unchanged(tmp_path):
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    for name in names:
        (tmp_path / name).write_text("as it was")
    result = prepare(tmp_path)
    assert result.returncode == 0 and "is prepared already" in result.stdout
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "as it was")


def test_another_directory_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    result = prepare(tmp_path)
    assert result.returncode == 1 and "is no prepared model; move it away" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine"
