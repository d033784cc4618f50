"""The logits of a role against Hugging Face's, in fp32, for every family, under one rank and TP2 x PP2. Families whose
layers differ also run under TP2 with sequence parallelism, PP2 with two chunks a stage, and two context ranks. Under each
layout the loaded weights are saved again, bit for bit."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.models.layout import Layout
from tests.engine_cases import full_logits, random_batch
from tests.ranks import run_ranks
from tests.tiny_models import FAMILIES, GEMMA_FAMILIES, LATENT_FAMILIES, MOE_FAMILIES, save_tiny_model

pytestmark = pytest.mark.golden
LAYOUTS = (
    Layout(),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, sequence_parallel=True),
    Layout(pipeline=2, virtual_pipeline=2),
    Layout(context=2),
)
# These differ from qwen3 or gemma3 in their weights and their rotation, which the first two layouts cut in every way.
ALIKE = ("llama", "llama3", "qwen2", "gemma3_scaled")
EXPERT_LAYOUTS = (
    Layout(),
    Layout(data=2, expert=2),
    Layout(tensor=2, pipeline=2, sequence_parallel=True, stages=(1, 3)),
    Layout(tensor=2, data=2, sequence_parallel=True, expert=4, expert_tensor=1),
)
LENGTHS = [(5, 7), (1, 3), (40, 60), (9, 1)]


EVERY = FAMILIES + GEMMA_FAMILIES + MOE_FAMILIES + LATENT_FAMILIES


# CI has every family, with its head tied or not by turns.
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=[pytest.mark.nightly] if tied == bool(number % 2) else [])
        for number, family in enumerate(EVERY)
        for tied in (False, True)
    ],
)
def test_logits_equal_hugging_face(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(tmp_path / "model", family, tied)
    weights = load_file(directory / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = []
    for sample in random_batch(model.config.vocab_size, LENGTHS).samples.values():
        tokens = np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None]).logits[0]
        rows.append(logits[len(sample.prompt_ids) - 1 : -1].numpy())
    expected = np.concatenate(rows)
    layouts = EXPERT_LAYOUTS if family in MOE_FAMILIES + LATENT_FAMILIES else LAYOUTS[: 2 if family in ALIKE else None]
    assert np.abs(expected).max() > 0.5  # the model says something
    for number in sorted({layout.ranks for layout in layouts}):
        alike = [layout for layout in layouts if layout.ranks == number]
        folders = [tmp_path / f"{number}-{place}" for place in range(len(alike))]
        for folder in folders:
            folder.mkdir()
        ranks = run_ranks(full_logits, number, str(directory), alike, LENGTHS, list(map(str, folders)))
        for layout, folder, of_layout in zip(alike, folders, zip(*ranks, strict=True), strict=True):
            logits = {sample: rows for of_rank in of_layout for sample, rows in of_rank.items()}
            actual = np.concatenate([logits[sample] for sample in range(len(LENGTHS))])
            assert np.abs(actual - expected).max() <= 1e-4, layout
            saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
            assert saved.keys() == weights.keys(), layout
            assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items()), layout
