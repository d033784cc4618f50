"""The logits of a role against Hugging Face's, in fp32, for every family, under one rank and TP2 x PP2. Families whose
layers differ also run under TP2 with sequence parallelism, PP2 with two chunks a stage, and two context ranks. Under each
layout the loaded weights are saved again, bit for bit. The scores of a reward model against Hugging Face's classifier."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.megatron.role import share_results
from megarl.models.layout import Layout
from megarl.schedule import compare
from tests.engine_cases import engine, full_logits, planned, random_batch, start
from tests.ranks import run_ranks
from tests.rollout_cases import completion_logits
from tests.tiny_models import (
    FAMILIES,
    GEMMA_FAMILIES,
    LATENT_FAMILIES,
    MOE_FAMILIES,
    save_tiny_model,
    save_tiny_reward_model,
)

pytestmark = pytest.mark.golden
LAYOUTS = (
    Layout(), Layout(tensor=2, pipeline=2), Layout(tensor=2, sequence_parallel=True), Layout(pipeline=2, virtual_pipeline=2),
    Layout(context=2),
)  # fmt: skip
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
    samples = random_batch(model.config.vocab_size, LENGTHS).samples.values()
    with torch.no_grad():
        expected = torch.cat([completion_logits(model, sample) for sample in samples]).numpy()
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


SCORED = [(5, 7), (1, 3), (20, 30), (9, 1), (2, 2), (6, 11), (4, 4), (3, 9)]


def scores_of(directory, layout, max_tokens):
    place = start(layout)
    judge = engine(directory, place, "reward_model")
    batch = random_batch(judge.shape.vocab, SCORED)
    mini_batch = planned(batch, layout, max_tokens=max_tokens)
    results, executed = judge.forward(batch, mini_batch)
    compare(mini_batch, place.data_rank, executed)
    return torch.cat(share_results(results.get("scores", {}), mini_batch, batch, place, one_each=True)).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scores_equal_hugging_face(tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    directory = save_tiny_reward_model(tmp_path, family)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    expected = []
    for sample in random_batch(model.config.vocab_size, SCORED).samples.values():
        tokens = np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64)
        with torch.no_grad():
            expected.append(float(model(torch.from_numpy(tokens)[None]).logits))
    assert np.std(expected) > 0.1  # the model says something
    layouts = [Layout()]
    if family == "qwen3":
        layouts += [Layout(tensor=2, pipeline=2), Layout(tensor=2, sequence_parallel=True), Layout(context=2)]
    for layout in layouts:
        for scores in run_ranks(scores_of, layout.ranks, str(directory), layout, 64):
            np.testing.assert_allclose(scores, expected, atol=1e-4, err_msg=str(layout))
