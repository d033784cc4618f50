"""A vLLM engine that took whole tensors through vLLM's own loader equals one that loaded them from disk.

The engines live in one process of their own, because vLLM's process groups and settings are global.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.family import ModelShape
from megarl.reshard.vllm import fixed_tensors
from tests.rollout_cases import save_model

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.sync, pytest.mark.slow]

Named = tuple[str, torch.Tensor]
Answers = list[list[tuple[int, dict[int, float]]]]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    from megarl.rollout.handle import engine_environment

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, set_environment, (engine_environment(1),)) as one:
        yield one


def set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def open_engine(model: Path) -> LLM:
    from vllm import LLM

    from megarl.rollout.engine import _rotary_fix

    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=16 << 20,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        **_rotary_fix(str(model)),
    )


def close_engines() -> None:
    """The next model may need other process groups."""
    import gc

    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    gc.collect()
    destroy_model_parallel()
    destroy_distributed_environment()


def answers(engine: LLM) -> Answers:
    """Greedy completions with the log-probabilities of the likeliest tokens."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": [3, 5, 7, 11 + number]} for number in range(4)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, logprobs=3), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        [
            (token, {t: entry.logprob for t, entry in likely.items()})
            for token, likely in zip(c.token_ids, c.logprobs, strict=True)
        ]
        for c in completions
    ]


def load(engine: LLM, tensors: Iterable[Named]) -> int:
    from megarl.rollout.checkpoint_loader import load_checkpoint_tensors

    config = engine.llm_engine.vllm_config.model_config
    [num_bytes] = engine.apply_model(lambda model: load_checkpoint_tensors(model, config, tensors))
    return num_bytes


def checkpoint(model: Path) -> list[Named]:
    fixed = fixed_tensors(ModelShape.from_directory(model))
    return [(name, tensor) for name, tensor in load_file(model / "model.safetensors").items() if name not in fixed]


class Broken(RuntimeError):
    """A source that ends in the middle."""


def breaking(tensors: list[Named], at: int) -> Iterator[Named]:
    yield from tensors[:at]
    raise Broken


def loads_in_turn(old: Path, new: Path) -> None:
    """All on one engine, which loaded `old` when it started."""
    engine, other = open_engine(old), open_engine(new)
    first, second = answers(engine), answers(other)
    assert first != second
    with pytest.raises(Broken):
        load(engine, breaking(checkpoint(new), 0))
    assert answers(engine) == first, "a load of nothing changed the engine"
    with pytest.raises(Broken):
        load(engine, breaking(checkpoint(new), len(checkpoint(new)) // 2))
    tensors = checkpoint(new)
    random.Random(0).shuffle(tensors)
    assert load(engine, tensors) == sum(tensor.nbytes for _, tensor in tensors)
    assert answers(engine) == second, "not the engine that loaded from disk"
    load(engine, checkpoint(old))
    assert answers(engine) == first, "a second load did not bring the first weights back"
    close_engines()


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3_moe", False), ("deepseek_v3", False)])
def test_loaded_engine_equals_one_that_loaded_from_disk(
    process: ProcessPoolExecutor, tmp_path: Path, family: str, tied: bool
) -> None:
    old, new = (save_model(tmp_path / name, family, tied, seed) for seed, name in enumerate(("old", "new")))
    process.submit(loads_in_turn, old, new).result(timeout=300)


def missing(tensors: list[Named]) -> list[Named]:
    return tensors[:-1]


def twice(tensors: list[Named]) -> list[Named]:
    return [*tensors, tensors[0]]


def unknown(tensors: list[Named]) -> list[Named]:
    return [*tensors, ("model.layers.7.mlp.up_proj.weight", tensors[0][1])]


def a_row_less(tensors: list[Named]) -> list[Named]:
    return [(name, tensor[:-1] if name == "model.norm.weight" else tensor) for name, tensor in tensors]


WRONG: dict[Callable[[list[Named]], list[Named]], str] = {
    missing: r"1 tensors did not come, \['model\.norm\.weight'\]",
    twice: r"'model\.embed_tokens\.weight' came twice",
    unknown: r"'model\.layers\.7\.mlp\.up_proj\.weight' is not in the model",
    a_row_less: r"model\.norm\.weight is \(127,\), expected 128 x 1",
}


def loads_of_wrong_checkpoints(model: Path, wrong: dict[Callable[[list[Named]], list[Named]], str]) -> None:
    from megarl.sync.manifest import SyncError

    engine = open_engine(model)
    before, right = answers(engine), checkpoint(model)
    for change, message in wrong.items():
        with pytest.raises(SyncError, match=f"checkpoint mode: .*{message}"):
            load(engine, change(right))
    load(engine, right)
    assert answers(engine) == before
    close_engines()


def test_wrong_checkpoints_are_refused_and_the_next_load_is_right(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    process.submit(loads_of_wrong_checkpoints, save_model(tmp_path, "llama", True, seed=0), WRONG).result(timeout=300)
