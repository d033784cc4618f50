"""Recompute and offload change where bytes are and when they are computed, and no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.offload import storages_of
from megarl.models.layout import Layout
from megarl.platform import cuda_stub, transfers
from tests.feature_cases import Feature, build, cut, train_with
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

PLAIN = Feature()
SELECTIVE = Feature(memory={"recompute": "selective", "recompute_modules": ("core_attn", "mlp")})
FULL = Feature(memory={"recompute": "full"})
ACTIVATIONS = Feature(memory={"offload_activations": True})
OPTIMIZER = Feature(memory={"offload": "optimizer"})
EVERYTHING = Feature(memory={"recompute": "full", "offload_activations": True, "offload": "all"})


@pytest.mark.layout
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=2, pipeline=2, sequence_parallel=True),
        pytest.param(Layout(pipeline=2, data=2, virtual_pipeline=2), marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
    ids=["one", "tensor, pipeline, sequence", "virtual pipeline, data"],
)
def test_every_feature_gives_the_same_numbers(tmp_path: Path, layout: Layout) -> None:
    directory = str(save_tiny_model(tmp_path, "qwen3", tied=True))
    features = [PLAIN, SELECTIVE, OPTIMIZER, EVERYTHING, ACTIVATIONS]
    for results in run_ranks(train_with, layout.ranks, directory, layout, features):
        plain, *exact, activations = results
        assert plain[0].loss > plain[-1].loss, "the updates move the weights"
        for feature, other in zip(features[1:], exact, strict=False):
            assert other == plain, feature
        for line, expected in zip(activations, plain, strict=True):  # see ActivationOffload
            assert line.loss == pytest.approx(expected.loss, rel=1e-6)
            assert line.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


@pytest.mark.layout
@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("gemma3_scaled", marks=pytest.mark.nightly)])
def test_families_with_modules_of_their_own_recompute_and_freeze(tmp_path: Path, family: str) -> None:
    directory = str(save_tiny_model(tmp_path, family, tied=family.startswith("gemma3")))
    layout, freeze = Layout(tensor=2, sequence_parallel=True), {"embedding": True, "layers": 2}
    frozen_full = Feature(freeze=freeze, memory={"recompute": "full"})
    (whole,) = run_ranks(train_with, 1, directory, Layout(), [Feature(freeze=freeze)], 2)
    modules = ("core_attn", "mla_up_proj", "shared_experts") if family == "deepseek_v3" else ("mlp",)
    selective_parts = Feature(memory={"recompute": "selective", "recompute_modules": modules})
    features = [PLAIN, selective_parts, FULL, frozen_full]
    for plain, selective, full, part in run_ranks(train_with, layout.ranks, directory, layout, features, 2):
        assert plain[0].loss > plain[-1].loss, "the updates move the weights"
        assert selective == plain and full == plain
        assert part[0].loss == plain[0].loss and part[0].grad_norm < plain[0].grad_norm, "frozen weights have gradients"
        for line, expected in zip(part, whole[0], strict=True):
            assert line.loss == pytest.approx(expected.loss, rel=1e-4)
            assert line.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def storages_between_phases(directory: str, precision: str) -> dict[str, list[int]]:
    """Bytes of the trainable and frozen weights, gradient buffers and optimizer states of one rank, by when."""
    from tests.engine_cases import objective_of, small_batch, start

    place = start(Layout())
    trained = build(directory, place, Feature(memory={"offload": "all"}, freeze={"layers": 1}, precision=precision))
    batch = small_batch(trained.shape.vocab)
    mini_batch = cut(batch, place.layout)

    def sizes() -> list[int]:
        weights = [parameter.data for model in trained.models for parameter in model.parameters()]
        gradients = [buffer.grad_data for chunk in trained.chunks for buffer in chunk.buffers]
        inner = trained.optimizer.chained_optimizers[0].optimizer
        states = [parameter.data for group in inner.param_groups for parameter in group["params"]]
        states += [tensor for state in inner.state.values() for name, tensor in state.items() if name != "step"]
        return [sum(storage.nbytes() for storage in storages_of(part)) for part in (weights, gradients, states)]

    sizes_by_phase = {"built": sizes()}
    with trained.present(training=True):
        trained.update(batch, mini_batch, objective_of("actor", 100))
        sizes_by_phase["update"] = sizes()
    sizes_by_phase["between"] = sizes()
    with trained.present():
        sizes_by_phase["forward"] = sizes()
    with pytest.raises(AssertionError, match="weights are offloaded"):
        trained.forward(batch, mini_batch)
    with trained.present(), pytest.raises(AssertionError, match="optimizer is offloaded"):
        trained.update(batch, mini_batch, objective_of("actor", 100))
    with trained.present(training=True):
        sizes_by_phase["again"] = sizes()
    return sizes_by_phase


@pytest.mark.layout
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_away_takes_no_memory_of_the_device(tmp_path: Path, precision: str) -> None:
    directory = str(save_tiny_model(tmp_path, "qwen3"))
    (sizes,) = run_ranks(storages_between_phases, 1, directory, precision)
    assert sizes["built"] == sizes["between"] == [0, 0, 0]
    assert all(size > 0 for size in sizes["update"]) and sizes["again"] == sizes["update"]
    # fp32 main parameters are the weights themselves.
    states = sizes["forward"][2] if precision == "fp32" else 0
    assert sizes["forward"] == [sizes["update"][0], 0, states]
    assert states < sizes["update"][2]


def test_a_tensor_comes_back_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream of the copies to the device: after the copy to the host, and after what the computation had freed."""
    events: list[str] = []

    class Stream(cuda_stub.Stream):
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, stream: Any) -> None:
            events.append(f"{self.name} waits for {stream.name}")

        def wait_event(self, event: Any) -> None:
            events.append(f"{self.name} waits for {event}")

        def record_event(self, event: Any = None) -> Any:
            return f"{len(events)} steps of {self.name}"

    class Copy(torch.Tensor):
        def copy_(self, *args: Any, **kwargs: Any) -> Any:
            assert kwargs["non_blocking"]
            events.append("copy")
            return super().copy_(args[0])

    monkeypatch.setattr(transfers, "stream_of", lambda device, direction: Stream(direction))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("computation"))
    monkeypatch.setattr(torch.cuda, "stream", cuda_stub.stream)
    monkeypatch.setattr(torch, "empty_like", lambda copy, **_: torch.zeros(copy.shape).as_subclass(Copy))
    tensor, complete = transfers.start_to_device(torch.arange(3.0), torch.device("cpu"), "its copy to the host")
    assert events == ["in waits for computation", "in waits for its copy to the host", "copy"]
    assert complete == "3 steps of in" and tensor.tolist() == [0, 1, 2]
