"""Adapters: the same numbers as LoRA by hand on the Hugging Face model, under every layout; the base model stays."""

from functools import cache

import numpy as np
import pytest
import torch

from megarl.megatron.lora import Adapter
from megarl.models.layout import Layout
from megarl.recipe.role_sections import LoraSection
from tests.engine_cases import EPSILON, small_batch
from tests.feature_cases import Feature, train_with
from tests.lora_cases import LORA, hand_made_lora, train_lora
from tests.ranks import run_ranks
from tests.rollout_cases import completion_logits
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.layout
STEPS = 3
LAYOUTS = [Layout(data=2), Layout(context=2)]  # VIRTUAL has the other axes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(family, tied) -> the model's directory, and what one rank trains on it; each computed once."""

    @cache
    def of(family, tied):
        directory = str(save_tiny_model(tmp_path_factory.mktemp(family), family, tied))
        return directory, run_ranks(train_lora, 1, directory, Layout(), STEPS, 400)[0]

    return of


def _assert_same(result, expected, where):
    for step, (line, other) in enumerate(zip(result.metrics, expected.metrics, strict=True)):
        assert line[:3] == pytest.approx(other[:3], rel=1e-4), (where, step)
        np.testing.assert_allclose(line[3], other[3], rtol=1e-4, atol=1e-4, err_msg=f"{where} {step}")
    np.testing.assert_allclose(result.adapted, expected.adapted, rtol=1e-4, atol=1e-4, err_msg=str(where))
    np.testing.assert_allclose(result.base, expected.base, rtol=1e-4, atol=1e-4, err_msg=str(where))


VIRTUAL = Layout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=True)


@pytest.mark.parametrize(
    "family,tied,layouts", [pytest.param("qwen3", True, LAYOUTS, marks=pytest.mark.slow), ("qwen2", False, [VIRTUAL])]
)
def test_updates_of_adapters_do_not_depend_on_the_layout(alone, family, tied, layouts):
    directory, reference = alone(family, tied)
    # B starts at 0: the first log-probabilities are the base model's, and they are its own still after the updates.
    np.testing.assert_array_equal(reference.metrics[0][3], reference.base)
    assert np.abs(reference.adapted - reference.base).max() > 1e-2
    assert reference.base_gradients == 0
    for layout in layouts:
        ranks = run_ranks(train_lora, layout.ranks, directory, layout, STEPS, 40)
        for result in ranks:
            _assert_same(result, reference, layout)
            assert result.base_gradients == 0


@pytest.mark.golden
def test_updates_equal_lora_by_hand(alone):
    from transformers import AutoModelForCausalLM

    directory, result = alone("qwen3", True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trained = hand_made_lora(model, result.initial, LORA)
    assert sum(parameter.numel() for parameter in trained) == result.num_trained
    optimizer = torch.optim.AdamW(trained, eps=EPSILON, weight_decay=0.0)
    batch = small_batch(model.config.vocab_size)
    num_tokens = int(batch.completion_lengths.sum())
    for loss, norm, learning_rate, logprobs in result.metrics:
        rows, total = [], torch.zeros(())
        for sample in batch.samples.values():
            log_softmax = completion_logits(model, sample).log_softmax(-1)
            target_logprobs = log_softmax.gather(1, torch.from_numpy(sample.completion.token_ids).long()[:, None]).squeeze(1)
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            rows.append(target_logprobs.detach())
            total = total - (target_logprobs + 0.1 * entropy).sum() / num_tokens
        np.testing.assert_allclose(logprobs, torch.cat(rows).numpy(), rtol=1e-4, atol=1e-4)
        assert loss == pytest.approx(float(total.detach()), rel=1e-4)
        optimizer.zero_grad()
        total.backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)), rel=1e-4)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()


def test_some_targets_alone(tmp_path):
    """Only what is asked for is adapted, and a stage of a pipeline has its own layers' adapters."""
    directory = str(save_tiny_model(tmp_path, "llama"))
    lora = LoraSection(rank=2, alpha=1.0, targets=("proj",))
    ranks = run_ranks(train_lora, 2, directory, Layout(pipeline=2), 1, 400, None, None, False, lora)
    assert [sorted(result.initial) for result in ranks] == [
        [f"decoder.layers.{layer}.self_attention.linear_proj" for layer in layers] for layers in ((0, 1), (2, 3))
    ]
    # Two layers of 4 heads of 12: A [2, 48] and B [32, 2].
    assert [result.num_trained for result in ranks] == [2 * (2 * 48 + 32 * 2)] * 2


def test_recompute_loses_no_gradient_of_an_adapter(tmp_path):
    """Of the first layer nothing before the recomputed part asks for a gradient: embedding and attention are frozen."""
    directory = str(save_tiny_model(tmp_path, "qwen3"))
    lora = LoraSection(rank=2, alpha=1.0, targets=("fc2",))
    features = [Feature(lora=lora, memory={"recompute": recompute}) for recompute in ("none", "selective", "full")]
    ((plain, *recomputed),) = run_ranks(train_with, 1, directory, Layout(), features, 2)
    assert all(lines == plain for lines in recomputed)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(Layout(tensor=2, sequence_parallel=True), marks=pytest.mark.nightly), Layout(pipeline=2, data=2)],
    ids=["tp", "pp-dp"],
)
def test_resume_of_adapters_is_exact_and_may_change_the_layout(tmp_path, layout):
    directory, folder = str(save_tiny_model(tmp_path / "model")), str(tmp_path / "checkpoints")
    whole = run_ranks(train_lora, layout.ranks, directory, layout, 5, 40, folder, 2)[0]
    resumed = run_ranks(train_lora, layout.ranks, directory, layout, 5, 40, folder, None, True)[0]
    assert len(resumed.metrics) == 3  # a shared Adam counter shows at the second
    for line, other in zip(resumed.metrics, whole.metrics[2:], strict=True):
        assert line[:3] == other[:3]
        np.testing.assert_array_equal(line[3], other[3])
    np.testing.assert_array_equal(resumed.adapted, whole.adapted)
    changed = run_ranks(train_lora, 2, directory, Layout(tensor=2), 5, 40, folder, None, True)[0]
    for line, other in zip(changed.metrics, whole.metrics[2:], strict=True):
        assert line[:3] == pytest.approx(other[:3], rel=1e-4)
        np.testing.assert_allclose(line[3], other[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_merged_in_parts_as_in_one(dtype, monkeypatch):
    torch.manual_seed(0)
    adapter = Adapter(weight := torch.randn(1031, 192, dtype=dtype), "qkv", LORA, False, None)
    torch.nn.init.normal_(adapter.a)
    torch.nn.init.normal_(adapter.b)
    expected = (weight.float() + adapter.scale * adapter.b.float() @ adapter.a.float()).to(dtype)
    whole = adapter.merged_into(weight)
    torch.testing.assert_close(whole, expected)
    monkeypatch.setattr("megarl.megatron.lora.MERGED_BYTES", 100 * 4 * 192)  # ten parts and a rest
    # Not equal: a BLAS may add in another order where there are other numbers of rows.
    torch.testing.assert_close(adapter.merged_into(weight), whole)
