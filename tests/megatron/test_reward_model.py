"""Scores of a reward model: those of Hugging Face's classifier, one a sequence, under every layout."""

import numpy as np
import pytest
import torch

from megarl.megatron.role import share_results
from megarl.models.layout import Layout
from megarl.schedule import Schedule, compare, plan_phase
from tests.engine_cases import engine, random_batch, start
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_reward_model

pytestmark = pytest.mark.golden
LENGTHS = [(5, 7), (1, 3), (20, 30), (9, 1), (2, 2), (6, 11), (4, 4), (3, 9)]


def scores_of(directory, layout, max_tokens):
    place = start(layout)
    judge = engine(directory, place, "reward_model")
    batch = random_batch(judge.shape.vocab, LENGTHS)
    schedule = Schedule("reward_model", max_tokens=max_tokens)
    (mini_batch,) = plan_phase(schedule, batch.lengths.tolist(), layout, 0).mini_batches
    results, executed = judge.forward(batch, mini_batch)
    compare(mini_batch, place.data_rank, executed)
    return torch.cat(share_results(results.get("scores", {}), mini_batch, batch, place, one_each=True)).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scores_equal_hugging_face(tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    directory = save_tiny_reward_model(tmp_path, family)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    expected = []
    for sample in random_batch(model.config.vocab_size, LENGTHS).samples.values():
        tokens = np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64)
        with torch.no_grad():
            expected.append(float(model(torch.from_numpy(tokens)[None]).logits))
    assert np.std(expected) > 0.1  # the model says something
    layouts = [Layout()]
    if family == "qwen3":
        layouts += [Layout(tensor=2, pipeline=2), Layout(tensor=2, sequence_parallel=True), Layout(context=2)]
    for layout in layouts:
        for found in run_ranks(scores_of, layout.ranks, str(directory), layout, 64):
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=str(layout))


def test_several_labels_are_no_reward(tmp_path):
    directory = save_tiny_reward_model(tmp_path, num_labels=2)
    with pytest.raises(AssertionError, match=r"score.weight has shape 2 x 32, expected 1 x 32"):
        run_ranks(scores_of, 1, str(directory), Layout(), 64)
