"""Small models that vLLM's CPU attention takes, their Megatron shards, and recipes for pools over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import numpy as np
import torch

from megarl.data.sample import Prompt, Sample
from megarl.models import FAMILIES, ModelShape
from megarl.models.layout import Box, Layout, RolloutLayout
from megarl.models.megatron_weights import megatron_boxes
from megarl.recipe.recipe import Recipe
from megarl.weight_sync import publish
from megarl.weight_sync.buckets import Round
from megarl.weight_sync.group import Written
from megarl.weight_sync.manifest import SyncSettings
from megarl.weight_sync.publish import WeightSync
from tests.recipe_cases import set_keys
from tests.tiny_models import random_model

if TYPE_CHECKING:
    from megarl.rollout.groups import RolloutBatch
    from megarl.rollout.pool import EnginePool

VOCAB = 131
STOP = (1, 5, 9, 20)
ONE_WORKER = RolloutLayout()


def save_model(
    directory: Path, family: str, tied: bool, seed: int, layers: int = 2, groups: int = 2, vocab: int = VOCAB
) -> Path:
    """A random model with 32 values a head, the smallest that vLLM's CPU attention takes. Latent attention has no `groups`
    of query heads."""
    sizes: dict[str, Any] = dict(
        vocab_size=vocab, hidden_size=128, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=groups, max_position_embeddings=512, tie_word_embeddings=tied, eos_token_id=1, bos_token_id=None,
        initializer_range=0.08,
    )  # fmt: skip
    if family == "gemma3":
        # Prompts and completions are longer than the window of the first layer.
        sizes |= dict(head_dim=32, query_pre_attn_scalar=20, sliding_window=4, sliding_window_pattern=2)
    elif family == "deepseek_v3":
        # vLLM's CPU kernel for latent attention takes 512 latent and 64 rotary dimensions alone.
        sizes |= dict(
            num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=20, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
            n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1, moe_intermediate_size=32,
            first_k_dense_replace=1, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc",
        )  # fmt: skip
    elif family != "qwen2":
        sizes["head_dim"] = 32
    model = random_model(family, seed, sizes)
    with torch.no_grad():
        # The bias of the experts' choice is the same whatever the seed: no update moves it, and no sync sends it.
        generator = torch.Generator().manual_seed(0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


@contextmanager
def without_vllm_table(family: str) -> Iterator[None]:
    """In this process, of a family that nobody has said of where vLLM holds its weights."""
    whole = FAMILIES[family]
    half = replace(whole, layer=lambda shape, number: [weight._replace(vllm=None) for weight in whole.layer(shape, number)])
    with mock.patch.dict(FAMILIES, {family: half}):
        yield


def cut(boxes: Sequence[Box], tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """The local parameters that boxes describe, by rank; a vector is one column. What none covers is 0."""
    sizes: dict[tuple[int, str], tuple[int, int]] = {}
    for s in boxes:
        rows, cols = sizes.get((s.rank, s.parameter), (0, 0))
        end = (s.local_row + s.row1 - s.row0, s.local_col + s.col1 - s.col0)
        sizes[s.rank, s.parameter] = (max(rows, end[0]), max(cols, end[1]))
    ranks: dict[int, dict[str, torch.Tensor]] = {}
    for (rank, parameter), size in sizes.items():
        ranks.setdefault(rank, {})[parameter] = torch.zeros(size)
    for s in boxes:
        content = tensors[s.name].float()
        content = content.view(content.shape[0], -1)[s.row0 : s.row1, s.col0 : s.col1]
        target = ranks[s.rank][s.parameter]
        target[s.local_row : s.local_row + content.shape[0], s.local_col : s.local_col + content.shape[1]] = content
    return ranks


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def megatron_shards(path: Path, layout: Layout) -> dict[int, dict[str, torch.Tensor]]:
    """What the ranks of a trainer would hold of a checkpoint."""
    return cut(megatron_boxes(ModelShape.from_directory(path), layout), checkpoint(path))


class Publisher:
    """A trainer of one rank that publishes checkpoints. `weight_sync/test_families.py` has trainers of many ranks, and
    `weight_sync/test_shards.py` trainers without vLLM."""

    def __init__(
        self,
        model: Path,
        rollout: RolloutLayout = ONE_WORKER,
        engines: int = 1,
        bucket_bytes: int = 1 << 16,
        timeout_s: float = 60.0,
        mode: str = "reshard",
        transport: str = "mapped",
        **more: Any,
    ) -> None:
        shape = ModelShape.from_directory(model)
        settings = SyncSettings("fp32", rollout, engines, bucket_bytes, timeout_s, mode, transport, **more)
        self.sync = WeightSync(shape, Layout(), settings, 0, None)
        self._last: tuple[int, Mapping[str, torch.Tensor], Any]

    def publish(self, version: int, model: Path, engines: Any) -> dict[str, float]:
        return self.publish_shards(version, self.shards(model), engines)

    def shards(self, model: Path) -> dict[str, torch.Tensor]:
        return megatron_shards(model, Layout())[0]

    def publish_shards(self, version: int, shards: dict[str, torch.Tensor], engines: Any) -> dict[str, float]:
        self._last = (version, shards, engines)
        return self.sync.publish(version, shards, engines)

    def resync(self, chosen: Sequence[int]) -> None:
        """As the pipeline does for an engine that was started again."""
        version, shards, engines = self._last
        self.sync.publish(version, shards, engines, chosen)

    def set_deadline(self, timeout_s: float) -> None:
        """`weight_sync.timeout_s` from the next attempt on."""
        self.sync._settings = replace(self.sync._settings, timeout_s=timeout_s)

    def close(self) -> None:
        self.sync.close()


class HasSync(Protocol):
    sync: WeightSync


def corrupt(publisher: HasSync, times: int, bucket: int = 0) -> None:
    """From here on one byte of what an engine gets is wrong, that many times: of a bucket, or of the checksums of mapped
    weights."""
    sync, left = publisher.sync, [times]
    if sync._sender is None:
        start = sync._groups.start

        def send_wrong_sums(call: str, engine: int, worker: int, content: torch.Tensor, what: str) -> Any:
            if call == "send" and left[0]:
                left[0] -= 1
                content = content ^ 1
            return start(call, engine, worker, content, what)

        sync._groups.start = send_wrong_sums  # type: ignore[method-assign]
        return
    sender: Any = sync._sender
    send_bucket = sender.send

    def send_wrong(entries: Round, written: Sequence[Written]) -> None:
        for part in written:
            if part.bucket == bucket and left[0]:
                left[0] -= 1
                part.content[100] ^= 1
        send_bucket(entries, written)

    sender.send = send_wrong


def corrupt_weights(publisher: HasSync, shards: Mapping[str, torch.Tensor], piece: int) -> None:
    """Workers copy one wrong bit in a piece of mapped weights; the rank has it right again when it computes checksums."""
    place = publisher.sync._pieces[0][piece].box
    content = place.within(shards[place.parameter])
    words = content.view({2: torch.int16, 4: torch.int32}[content.itemsize])
    first, local_checksums = (0,) * words.ndim, publish.local_checksums

    def put_right(*arguments: Any) -> torch.Tensor:
        publish.local_checksums = local_checksums  # all workers have copied all
        words[first] ^= 1
        return local_checksums(*arguments)

    words[first] ^= 1
    publish.local_checksums = put_right  # type: ignore[assignment]


def recipe(model: Path, *edits: tuple[str, Any], **rollout: Any) -> Recipe:
    """Four prompts in groups of four, up to 24 new tokens; with dotted keys and keys of `rollout` set."""
    data: dict[str, Any] = {
        "run": {"name": "pool", "steps": 1}, "model": {"path": str(model)},
        "algorithm": {"advantage": "grpo", "group_size": 4},
        "data": {"prompts": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8}, "max_prompt_tokens": 16},
        "reward": [{"kind": "last_number"}], "trainer": {"ranks": 1, "precision": "fp32"},
        "actor": {"optimizer": {"lr": 1e-3}},
        "rollout": {"max_new_tokens": 24, "kv_cache_bytes": 32 << 20, "timeout_s": 300.0} | rollout,
        "phases": {
            "rollout": {"prompts": 4, "max_concurrent": 7},
            "actor_update": {"mini_batch": 16, "micro_batch": {"sequences": 4}},
        },
    }  # fmt: skip
    return Recipe.model_validate(set_keys(data, edits))


def prompts(count: int = 4, start: int = 0) -> list[Prompt]:
    """Random prompts of different lengths."""
    result = []
    for index in range(start, start + count):
        random = np.random.default_rng(index)
        ids = random.integers(0, VOCAB, size=3 + 2 * (index % 6)).astype(np.int32)
        result.append(Prompt(index, ids, "", "", {}))
    return result


def generate(
    pool: EnginePool,
    requested: Sequence[Prompt],
    step: int,
    resync: Callable[[Sequence[int]], None] | None = None,
    completions: int | None = None,
    temperature: float | None = None,
) -> RolloutBatch:
    """Sample groups with a pool, as a training step does."""
    from megarl.rollout.stream import RolloutStream, Sampling

    stream = RolloutStream(pool._recipe, pool, pool.engines[0].settings.seed)

    def resumes(engines: Sequence[int]) -> None:
        assert resync is not None, "engines died"
        stream.pause()
        resync(engines)
        stream.resume(0, engines)

    try:
        size = pool._recipe.algorithm.group_size if completions is None else completions
        return stream.sample(requested, Sampling(size, step, temperature), resumes)[0]
    finally:
        stream.close()


def samples(pool: EnginePool, step: int) -> dict[int, Sample]:
    """Four groups of four."""
    return generate(pool, prompts(), step).payload.fetch(range(16))


def distance(model: Path, drawn: dict[int, Sample], temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probabilities of its own samples and transformers'."""
    reference = huggingface_logprobs(model, drawn, temperature)
    return max(float(np.abs(reference[s] - drawn[s].completion.logprobs).max()) for s in drawn)


def same(first: dict[int, Sample], second: dict[int, Sample]) -> bool:
    """Identical tokens and bitwise identical log-probabilities."""
    return first.keys() == second.keys() and all(
        np.array_equal(first[s].completion.token_ids, second[s].completion.token_ids)
        and np.array_equal(first[s].completion.logprobs, second[s].completion.logprobs)
        for s in first
    )


def completion_logits(model: Any, sample: Sample) -> torch.Tensor:
    """Logits [completion tokens, vocabulary] of a transformers model for a sample's completion."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64))
    logits: torch.Tensor = model(tokens[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits


def huggingface_logprobs(path: Path, samples: dict[int, Sample], temperature: float) -> dict[int, np.ndarray]:
    """float32 log-probability of each completion token by transformers, under the sampling distribution."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = {}
    with torch.no_grad():
        for s, sample in samples.items():
            logprobs = torch.log_softmax(completion_logits(model, sample) / temperature, dim=-1)
            targets = torch.from_numpy(sample.completion.token_ids).long()
            answers[s] = logprobs.gather(1, targets[:, None])[:, 0].numpy()
    return answers
