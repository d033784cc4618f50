"""Faults of a checkpoint's files are named from the headers: file, tensor, expected value and actual value. The other files
of a model directory: unfetched files, required files, and files that an export copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from megarl.data.tokenizer import load_tokenizer
from megarl.models import ModelShape
from megarl.models.megatron_weights import checkpoint_sizes
from megarl.models.model_files import check_fetched, copy_model_files
from megarl.models.stored_weights import INDEX, check_tokenizer, check_weights, stored_tensors
from megarl.recipe import RecipeError, load_recipe
from tests.data.test_prompts import CHAT, byte_tokenizer, jsonl, rows_of
from tests.recipe_cases import CONFIG, PPO, edited, make_folder, refusals, write

SHAPE = ModelShape.from_config(CONFIG)
Tensors = dict[str, np.ndarray]
KEY = "model.layers.1.self_attn.k_proj.weight"


def tensors(shape: ModelShape = SHAPE) -> Tensors:
    sizes = checkpoint_sizes(shape)
    return {name: np.zeros(size if size[1] > 1 else size[:1], np.float32) for name, size in sizes.items()}


def two_files(folder: Path, content: Tensors) -> None:
    """Write two files and their index."""
    names = list(content)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: content[name] for name in part}, folder / file)
    places = {name: file for file, part in halves.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def test_a_complete_checkpoint_passes_with_the_file_of_each_tensor(tmp_path: Path) -> None:
    content = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    content[KEY] += np.arange(64)
    two_files(tmp_path, content)
    stored = check_weights(tmp_path, SHAPE)
    tensor = stored[KEY]
    assert tensor.format == "F32" and tensor.shape == (32, 64)
    assert np.array_equal(load_file(tensor.file)[KEY], content[KEY])


def test_other_files_than_the_weights_are_ignored(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    save_file({"layers.0.wq.weight": np.zeros((64, 64), np.float32)}, tmp_path / "consolidated.safetensors")
    assert {stored.file.name for stored in check_weights(tmp_path, SHAPE).values()} == {"model.safetensors"}


def edit(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        content = tensors()
        change(content)
        two_files(folder, content)

    return build


def set_to(name: str, value: np.ndarray) -> Callable[[Path], None]:
    return edit(lambda content: content.update({name: value}))


def gone(folder: Path) -> None:
    two_files(folder, tensors())
    (folder / "b.safetensors").unlink()


def torn(folder: Path) -> None:
    two_files(folder, tensors())
    file = folder / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def elsewhere(folder: Path) -> None:
    two_files(folder, tensors())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][KEY] = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[index["weight_map"][KEY]]
    (folder / INDEX).write_text(json.dumps(index))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (edit(lambda content: content.pop(KEY)), rf"no tensor '{KEY}', expected 32 x 64 by config.json$"),
    "many missing": (edit(lambda content: [content.pop(name) for name in list(content) if "layers.3" in name]),
                     r"no tensor 'model\.layers\.3\..*\(and 10 more\)"),
    "mis-shaped": (set_to(KEY, np.zeros((64, 32), np.float32)),
                   rf"[ab]\.safetensors: {KEY} has shape 64 x 32, expected 32 x 64"),
    "extra": (set_to("model.layers.0.mlp.gate.weight", np.zeros((8, 64), np.float32)),
              r"[ab]\.safetensors: holds 'model\.layers\.0\.mlp\.gate\.weight', 8 x 64, which a qwen3"),
    "a layer too many": (set_to("model.layers.4.input_layernorm.weight", np.zeros(64, np.float32)),
                         r"holds 'model\.layers\.4\.input_layernorm"),
    "quantized": (set_to(KEY, np.zeros((32, 64), np.int8)), rf"{KEY} is in I8, expected one of F64, F32, F16, BF16"),
    "no file": (gone, rf"{INDEX}: names the file 'b\.safetensors', for '.*' and others, which is not there"),
    "torn": (torn, r"b\.safetensors: is torn, or no safetensors file: .*not fully covered; fetch it again"),
    "wrong index": (elsewhere, rf"[ab]\.safetensors: has no tensor '{KEY}', which {INDEX} says is there"),
    "nothing": (lambda folder: None, r"no \*\.safetensors there"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_fault_of_a_checkpoint_is_named(tmp_path: Path, case: str) -> None:
    build, message = BROKEN[case]
    build(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_weights(tmp_path, SHAPE)


def test_unused_heads_are_allowed(tmp_path: Path) -> None:
    save_file(tensors() | {"score.weight": np.zeros((1, 64), np.float32)}, tmp_path / "model.safetensors")
    check_weights(tmp_path, SHAPE, critic=True)
    with pytest.raises(ValueError, match=r"holds 'score\.weight'"):
        check_weights(tmp_path, SHAPE)
    tied = ModelShape.from_config(CONFIG | {"tie_word_embeddings": True})
    save_file(tensors(), tmp_path / "model.safetensors")
    check_weights(tmp_path, tied)


def test_a_classifier_needs_a_head_of_one_label(tmp_path: Path) -> None:
    for size, message in (
        (1, ""),
        (2, r"score\.weight has shape 2 x 64, expected 1 x 64"),
        (0, r"no tensor 'score\.weight'"),
    ):
        head = {"score.weight": np.zeros((size, 64), np.float32)} if size else {}
        save_file(tensors() | head, tmp_path / "model.safetensors")
        if not message:
            check_weights(tmp_path, SHAPE, critic=True, score=True)
            continue
        with pytest.raises(ValueError, match=message):
            check_weights(tmp_path, SHAPE, critic=True, score=True)


def tokenizer(folder: Path, last: int, added: int) -> None:
    content = {"model": {"type": "BPE", "vocab": {"a": 0, "z": last}}, "added_tokens": [{"id": added, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_a_token_without_a_row_in_the_embedding_is_named(tmp_path: Path) -> None:
    check_tokenizer(tmp_path, SHAPE)  # without tokenizer.json, the loader of the tokenizer decides
    tokenizer(tmp_path, 254, 255)
    check_tokenizer(tmp_path, SHAPE)
    tokenizer(tmp_path, 254, 256)  # an added token, as Gemma's token for pictures, which has no embedding in the text models
    check_tokenizer(tmp_path, SHAPE)
    tokenizer(tmp_path, 256, 255)
    with pytest.raises(ValueError, match=r"tokenizer\.json: token 'z' has the id 256, expected at most 255.* = 256 rows"):
        check_tokenizer(tmp_path, SHAPE)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 300}}))
    with pytest.raises(ValueError, match="has the id 299, expected at most 255"):
        check_tokenizer(tmp_path, SHAPE)


def test_a_recipe_with_a_faulty_model_is_refused_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, monkeypatch)
    load_recipe(write(folder, edited(("critic.path", "deep"))))
    edit(lambda content: content.pop(KEY))(folder / "tiny")
    two_files(folder / "deep", tensors())  # four layers, but config.json says eight
    tokenizer(folder / "deep", 0, 1)
    refused = refusals(("critic.path", "deep"))
    assert refused.keys() == {"model.path", "critic.path"}
    assert KEY in refused["model.path"] and "model.layers.4." in refused["critic.path"]


def test_a_role_with_another_model_must_have_the_actors_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path, monkeypatch)
    models = ("critic.path", "deep"), ("reference", {"path": "experts", "layout": {}})
    tokenizer(folder / "tiny", 3, 4)
    tokenizer(folder / "deep", 3, 4)
    tokenizer(folder / "experts", 3, 5)
    refused = refusals(*models)
    assert refused.keys() == {"reference.path"}
    assert "'<end>' the number 5, that of model.path gives it 4" in refused["reference.path"]


def test_a_run_starts_only_with_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from megarl import build as run

    folder = make_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(run, "train", lambda recipe, resume: pytest.fail("the run started"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    assert run.main([str(write(folder, lambda: PPO))]) == 2
    assert "model.path = 'tiny': cannot be loaded: 'tiny': no *.safetensors there" in capsys.readouterr().err


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11422654\n"


def test_a_file_that_git_lfs_has_not_fetched_is_named_with_the_way_out(tmp_path: Path) -> None:
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


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some models transformers 5 makes an empty tokenizer, which turns every prompt into no tokens."""
    make_folder(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="model.path is '.*tiny'.* has no tokenizer .*copy the files"):
        load_tokenizer(str(tmp_path / "tiny"))
    two_files(tmp_path / "tiny", tensors())
    with pytest.raises(RecipeError, match="model.path.*has no tokenizer"):
        load_recipe(write(tmp_path, edited()))


def test_an_export_copies_all_files_except_weights(tmp_path: Path) -> None:
    def content(name: str) -> str:
        return json.dumps({"model_type": "qwen3", "name": name})

    source, target = tmp_path / "model", tmp_path / "exported"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHAT, "tool_use": "TOOLS " + CHAT}
    tokenizer.save_pretrained(source)
    copied = ["config.json", "generation_config.json", "tokenizer.model", "LICENSE", "own.py", "1_Pooling/config.json"]
    left = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "onnx/model.onnx",
            "original/consolidated.00.pth", ".git/config", "adapter_config.json"]  # fmt: skip
    for name in copied + left:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content(name))
    target.mkdir()
    copy_model_files(source, target)
    assert all((target / name).read_text() == content(name) for name in copied)
    assert not any((target / name).exists() for name in left)
    assert AutoTokenizer.from_pretrained(target).chat_template == tokenizer.chat_template
