"""A group's prompt is computed once, on CPUs too, where vLLM's own blocks of the cache are longer than most prompts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.in_process_engine import open_engine
from tests.tiny_models import save_tiny_model


def asks_for_a_group(model: Path) -> tuple[list[int], list[list[int]]]:
    """Tokens that each completion of a prompt found in the cache, and what was sampled."""
    from vllm import SamplingParams

    prompt: Any = {"prompt_token_ids": list(range(2, 47))}
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    outputs = open_engine(model, enable_prefix_caching=True).generate([prompt] * 4, sampling, use_tqdm=False)
    return [output.num_cached_tokens or 0 for output in outputs], [list(output.outputs[0].token_ids) for output in outputs]


def test_a_group_shares_a_prompt_that_is_shorter_than_vllms_blocks(
    engine_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, "llama", head_dim=32)
    cached, sampled = engine_process.submit(asks_for_a_group, model).result(300)
    assert cached == [0, 32, 32, 32]
    assert sampled == [sampled[0]] * 4, "the first one computed all of its prompt"
