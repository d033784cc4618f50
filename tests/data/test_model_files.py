"""The files of a model directory: unfetched files, required files, and files that an export copies."""

import json

import pytest
from transformers import AutoTokenizer

from megarl.data.tokenizer import load_tokenizer
from megarl.models.model_files import check_fetched, copy_model_files
from megarl.models.stored_weights import check_tokenizer, stored_tensors
from megarl.recipe import RecipeError, load_recipe
from tests.data.test_prompts import CHAT, byte_tokenizer, jsonl, rows_of
from tests.models.test_stored_weights import SHAPE, tensors, two_files
from tests.recipe_cases import edited, make_folder, write

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11422654\n"


def test_a_file_that_git_lfs_has_not_fetched_is_named_with_the_way_out(tmp_path):
    readers = {
        "model.safetensors": lambda: stored_tensors(tmp_path),
        "tokenizer.json": lambda: check_tokenizer(tmp_path, SHAPE),
        "rows.jsonl": lambda: rows_of(jsonl(tmp_path / "rows.jsonl"), seed=0),
        "rows.parquet": lambda: rows_of(jsonl(tmp_path / "rows.parquet", "parquet"), seed=0),
    }
    for name, read in readers.items():
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(ValueError, match=f"{name}: is a pointer of Git LFS.*git lfs pull"):
            read()
    check_fetched(tmp_path / "not there")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path, monkeypatch):
    """For some models transformers 5 makes an empty tokenizer, which turns every prompt into no tokens."""
    make_folder(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="model.path is '.*tiny'.* has no tokenizer .*copy the files"):
        load_tokenizer(str(tmp_path / "tiny"))
    two_files(tmp_path / "tiny", tensors())
    with pytest.raises(RecipeError, match="model.path.*has no tokenizer"):
        load_recipe(write(tmp_path, edited()))


def test_an_export_copies_all_files_except_weights(tmp_path):
    def content(name):
        return json.dumps({"model_type": "qwen3", "name": name})

    source, target = tmp_path / "model", tmp_path / "exported"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHAT, "tool_use": "TOOLS " + CHAT}
    tokenizer.save_pretrained(source)
    kept = ["config.json", "generation_config.json", "tokenizer.model", "LICENSE", "own.py", "1_Pooling/config.json"]
    left = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "onnx/model.onnx",
            "original/consolidated.00.pth", ".git/config", "adapter_config.json"]  # fmt: skip
    for name in kept + left:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content(name))
    target.mkdir()
    copy_model_files(source, target)
    assert all((target / name).read_text() == content(name) for name in kept)
    assert not any((target / name).exists() for name in left)
    assert AutoTokenizer.from_pretrained(target).chat_template == tokenizer.chat_template
