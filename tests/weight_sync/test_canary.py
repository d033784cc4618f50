"""The canary names an engine that does not compute what the actor computes, and no other engine."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from megarl.megatron.scores import score_sequences
from megarl.models import ModelShape
from megarl.models.layout import Layout, RolloutLayout
from megarl.recipe.weight_sync_section import CanarySection
from megarl.weight_sync.canary import Canary, Verdict, canary_sequences
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.engine_cases import engine as make_role
from tests.engine_cases import start
from tests.in_process_engine import Receiving, close_engines, open_receiver
from tests.ports import unused_port
from tests.ranks import run_ranks
from tests.rollout_cases import save_model

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.sync

SEQUENCES, TOKENS = 2, 32
QUICKSTART = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"  # `make setup` makes it
DTYPES = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}
Scores = Mapping[int, np.ndarray]


# Scores made up -----------------------------------------------------------------------------------------------------------


def given(actor: np.ndarray, precision: str = "bf16") -> Canary:
    """A canary whose actor has scored version 1."""
    canary = Canary(CanarySection(), precision, canary_sequences(131, *actor.shape))
    canary._version, canary._actor = 1, actor
    return canary


def noisy(actor: np.ndarray, seed: int, noise: float = 0.08) -> np.ndarray:
    """An engine of one data-parallel rank."""
    return (actor + np.random.default_rng(seed).normal(0.0, noise, (1, *actor.shape))).astype(np.float32)


ACTOR = np.random.default_rng(0).normal(-10.0, 3.0, (SEQUENCES, TOKENS - 1)).astype(np.float32)


def test_sequences_depend_on_the_vocabulary_alone_and_avoid_its_ends() -> None:
    first, second = (canary_sequences(1000, 3, 50) for _ in range(2))
    assert all(np.array_equal(tokens, other) for tokens, other in zip(first, second, strict=True))
    assert len(first) == 3 and all(len(tokens) == 50 and tokens.min() >= 125 and tokens.max() < 875 for tokens in first)


def test_noise_that_grows_slowly_is_no_drift_and_a_jump_is() -> None:
    canary = given(ACTOR)
    for version in range(200):
        scores = {0: noisy(ACTOR, version, 0.08 + 0.001 * version)}
        assert canary.judge(partial(dict, scores)).drift is None
    verdict = canary.judge(lambda: {0: noisy(ACTOR, 200, 3 * 0.28)})
    assert verdict.drift is not None and "rollout engine 0 does not compute" in verdict.drift
    assert verdict.metrics["sync/canary_drift"] == 1.0


@pytest.mark.parametrize("wrong", [np.nan, -np.inf, -60.0])
def test_a_drift_names_engine_version_difference_place_and_way_out(wrong: float) -> None:
    """Also at the first canary, by what rounding can explain."""
    canary, broken = given(ACTOR), noisy(ACTOR, 1)
    broken[0, 1, 6] = wrong
    drift = canary.judge(lambda: {0: noisy(ACTOR, 0), 1: broken}).drift
    assert drift is not None
    for fact in (
        "rollout engine 1 ",
        "version 1:",
        "sequence 1, token 7",
        "on average, above 0.5",
        "--resume",
        "action: warn",
    ):
        assert fact in drift


def test_a_drift_below_noise_is_found_between_engines_that_agree_bit_for_bit() -> None:
    canary, good = given(ACTOR), noisy(ACTOR, 0)
    assert canary.judge(lambda: {number: good for number in range(3)}).metrics["sync/canary_spread"] == 0.0
    broken = good.copy()
    broken[0, 0, 3] += 1e-3
    drift = canary.judge(lambda: {0: good, 1: broken, 2: good}).drift
    assert drift is not None and "rollout engine 1 " in drift and "sequence 0, token 4" in drift
    assert canary.judge(lambda: {number: good for number in range(3)}).drift is None


def test_a_data_parallel_rank_is_an_engine_of_its_own() -> None:
    canary, good = given(ACTOR), noisy(ACTOR, 0)
    pair = np.concatenate([good, good])
    assert canary.judge(lambda: {0: pair}).drift is None
    broken = pair.copy()
    broken[1, 0, 0] += 0.5
    assert "rollout engine 0, data-parallel rank 1 " in str(canary.judge(lambda: {0: broken}).drift)


def test_engines_that_round_by_chance_raise_no_alarm() -> None:
    """They agreed bit for bit so far, and then an engine gives other numbers each time that it scores."""
    canary, good, seeds = given(ACTOR), noisy(ACTOR, 0), iter(range(1, 99))
    assert canary.judge(lambda: {0: good, 1: good}).drift is None
    for _ in range(3):
        assert canary.judge(lambda: {0: good, 1: noisy(ACTOR, next(seeds))}).drift is None


def test_a_restarted_engine_is_compared_with_the_others_of_its_version() -> None:
    canary, good = given(ACTOR), noisy(ACTOR, 0)
    assert canary.judge(lambda: {0: good, 1: good}).drift is None
    assert canary.judge(lambda: {1: good}, restarted=True).drift is None
    assert "rollout engine 1 " in str(canary.judge(lambda: {1: good + np.float32(1e-3)}, restarted=True).drift)


def test_every_nth_version_is_due_and_the_first_of_a_start() -> None:
    canary = Canary(CanarySection(every=3), "bf16", canary_sequences(131, 2, 8))
    assert canary.is_due(7, restarted=False), "a resume begins with a canary"
    canary._version, canary._actor = 7, ACTOR
    assert [version for version in range(8, 15) if canary.is_due(version, restarted=False)] == [9, 12]
    assert canary.is_due(7, restarted=True) and not canary.is_due(8, restarted=True)


# The actor's scores, under every layout -----------------------------------------------------------------------------------


def scores_of(model: str, layout: Layout) -> np.ndarray:
    role = make_role(model, start(layout))
    role.head.temperature = 0.7  # a rollout's
    scores = score_sequences(role, canary_sequences(role.shape.vocab, 3, 20))
    assert role.head.temperature == 0.7
    return scores


def test_every_layout_gives_the_same_scores_on_every_rank(tmp_path: Path) -> None:
    """Those of transformers, at temperature 1."""
    from transformers import AutoModelForCausalLM

    model = save_model(tmp_path, "qwen3", True, seed=0, layers=4)
    ids = torch.from_numpy(np.stack(canary_sequences(131, 3, 20))).long()
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits.log_softmax(-1)
    expected = logprobs[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2).numpy()
    for layout in (Layout(), Layout(data=2), Layout(2, 2), Layout(pipeline=2, virtual_pipeline=2), Layout(context=2)):
        for scores in run_ranks(scores_of, layout.ranks, str(model), layout):
            assert np.abs(scores - expected).max() < 1e-4, layout


# Real parts: a Megatron actor and two vLLM engines ------------------------------------------------------------------------


class Parts:
    """An actor, the trainer's end of the sync, and two engines in this process."""

    def __init__(self, model: Path, precision: str, bucket_bytes: int = 1 << 16) -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(unused_port())
        name, _ = DTYPES[precision]
        self.precision = precision
        self.actor = make_role(str(model), start(Layout()), precision=precision)
        self.engines = [open_receiver(model, dtype=name) for _ in range(2)]
        settings = SyncSettings(precision, RolloutLayout(), 1, bucket_bytes, 60.0)
        self.syncs = [WeightSync(ModelShape.from_directory(model), Layout(), settings, 0, None) for _ in self.engines]
        self.version = 0
        self.canaries = {"alone": self._canary(), "pair": self._canary()}

    def _canary(self) -> Canary:
        sequences = canary_sequences(self.actor.shape.vocab, SEQUENCES, TOKENS)
        return Canary(CanarySection(), self.precision, sequences)

    def shards(self) -> dict[str, torch.Tensor]:
        return {name: shard.detach().clone() for name, shard in self.actor.shards().items()}

    def update(self, size: float, seed: int) -> None:
        """Move every weight of the actor by about `size`, as Adam does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for shard in self.actor.shards().values():
                shard += size * torch.randn(shard.shape, generator=generator).to(shard.dtype)

    def publish(self, wrong: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send the actor's weights to both engines, or `wrong` ones to engine 1."""
        self.version += 1
        for number, engine in enumerate(self.engines):
            shards = self.actor.shards() if wrong is None or number == 0 else wrong
            self.syncs[number].publish(self.version, dict(shards), Receiving(engine))

    def judge(self) -> dict[str, Verdict]:
        """By a canary that has engine 1 alone, and by one that has both."""
        for canary in self.canaries.values():
            if canary._version != self.version:
                canary.score_actor(self.actor, self.version)
        sequences = self.canaries["pair"].sequences
        scored = {number: engine_scores(engine, sequences) for number, engine in enumerate(self.engines)}
        alone = {0: scored[1]}
        return {"alone": self.canaries["alone"].judge(lambda: alone), "pair": self.canaries["pair"].judge(lambda: scored)}

    def close(self) -> None:
        for sync in self.syncs:
            sync.close()
        self.engines.clear()
        close_engines()


def engine_scores(engine: LLM, sequences: list[np.ndarray]) -> np.ndarray:
    from megarl.rollout.engine_report import prompt_scores
    from megarl.rollout.engine_settings import scoring_parameters

    prompts: Any = [{"prompt_token_ids": tokens.tolist()} for tokens in sequences]
    outputs = engine.generate(prompts, scoring_parameters(), use_tqdm=False)
    return np.stack([prompt_scores(output) for output in outputs])[None]


def drifts(verdicts: dict[str, Verdict]) -> set[str]:
    """Which of the canaries notice. The pair's names engine 1, and engine 0 too if the actor cannot tell."""
    drift = verdicts["pair"].drift
    assert drift is None or "rollout engine 1 " in drift
    return {name for name, verdict in verdicts.items() if verdict.drift is not None}


def swap_experts(shards: dict[str, torch.Tensor]) -> None:
    """Exchange two experts of the last layer."""
    for kind in ("linear_fc1", "linear_fc2"):
        first, second = (shards[f"decoder.layers.1.mlp.experts.local_experts.{expert}.{kind}.weight"] for expert in (2, 5))
        original = first.clone()
        first.copy_(second)
        second.copy_(original)


def keep_layer(shards: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
    """Leave the last layer as it was a version before."""
    for name, shard in shards.items():
        if "layers.1." in name:
            shard.copy_(old[name])


def zero_rotary(model: Any) -> None:
    """Of this engine alone: vLLM's engines of one process share these buffers."""
    for module in model.modules():
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = copy.deepcopy(module.rotary_emb)
            module.rotary_emb.cos_sin_cache.zero_()


def flip(model: Any, bit: int) -> None:
    """Flip a bit of an element of the last layer's norm."""
    weight = dict(model.named_parameters())["model.layers.1.post_attention_layernorm.weight"].data
    words = weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int16)
    words[3] ^= 1 << bit if bit < 8 * words.element_size() - 1 else torch.iinfo(words.dtype).min


def faults(model: Path, precision: str) -> dict[str, set[str]]:
    """Which canaries notice each fault of engine 1. Between two faults both engines have the actor's weights."""
    parts = Parts(model, precision)
    noticed = {}

    def check(
        name: str, wrong: Mapping[str, torch.Tensor] | None = None, on_engine: Callable[[Any], None] | None = None
    ) -> None:
        parts.publish(wrong)
        if on_engine is not None:
            parts.engines[1].apply_model(on_engine)
        noticed[name] = drifts(parts.judge())

    for number in range(3):
        check(f"right {number}")
    for size in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        old = parts.shards()
        parts.update(size, seed=0)
        new = parts.shards()
        keep_layer(new, old)
        check(f"layer {size:g}", new)
    check("right again")
    swapped = parts.shards()
    swap_experts(swapped)
    check("experts", swapped)
    parts.publish()
    for bit in range(8 * DTYPES[precision][1].itemsize):
        parts.engines[1].apply_model(lambda model, bit=bit: flip(model, bit))
        noticed[f"bit {bit}"] = drifts(parts.judge())
        parts.engines[1].apply_model(lambda model, bit=bit: flip(model, bit))
    check("all right")
    check("rotary", None, zero_rotary)
    parts.close()
    return noticed


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_a_broken_engine_is_noticed_at_the_next_sync(
    engine_process: ProcessPoolExecutor, tmp_path: Path, precision: str
) -> None:
    model = save_model(tmp_path / "model", "qwen3_moe", False, seed=0)
    noticed = engine_process.submit(faults, model, precision).result(timeout=600)
    assert {name for name, canaries in noticed.items() if "right" in name and canaries} == set(), "a false alarm"
    broken = {name: canaries for name, canaries in noticed.items() if "right" not in name}
    # Two engines notice whatever changes a number.
    assert {name for name, canaries in broken.items() if "pair" not in canaries} == set()
    by_actor = {name for name, canaries in broken.items() if "alone" in canaries}
    severe = {"rotary", "experts", "layer 0.01"}
    if precision == "bf16":
        assert by_actor >= severe | {"bit 14"}
    else:
        assert by_actor >= severe | {f"bit {bit}" for bit in range(16, 32)} | {f"layer {size:g}" for size in (1e-4, 1e-3)}


def syncs_without_a_fault(model: Path, precision: str, count: int, bucket_bytes: int) -> list[float]:
    """The differences from the actor. Raises AssertionError at a false alarm."""
    parts, differences = Parts(model, precision, bucket_bytes), []
    for seed in range(count):
        parts.update(3e-4, seed)
        parts.publish()
        verdicts = parts.judge()
        assert not drifts(verdicts), verdicts
        differences.append(verdicts["alone"].metrics["sync/canary_difference"])
    parts.close()
    return differences


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)  # over 25 minutes on a CPU without bf16 units, which emulates them
@pytest.mark.parametrize("is_tiny", [True, False], ids=["tiny", "quickstart"])
def test_two_hundred_syncs_raise_no_alarm(engine_process: ProcessPoolExecutor, tmp_path: Path, is_tiny: bool) -> None:
    model = save_model(tmp_path / "model", "llama", True, seed=0) if is_tiny else QUICKSTART
    task = engine_process.submit(syncs_without_a_fault, model, "bf16", 200, 1 << 16 if is_tiny else 1 << 25)
    differences = task.result(timeout=3300)
    assert len(differences) == 200 and min(differences) > 0
