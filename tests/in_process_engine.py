"""vLLM engines in one process, without Ray: there they start in a few seconds, as no process has to import vLLM for them.

vLLM's process groups and settings are global, so this is for a process of its own: the fixture `engine_process`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.weight_sync.manifest import WeightManifest

if TYPE_CHECKING:
    from vllm import LLM

Answers = list[list[tuple[int, dict[int, float]]]]


class EngineProcess(ProcessPoolExecutor):
    """A process that has imported vLLM in the environment of engines; each call runs in a fork of it, with fresh globals."""

    def __init__(self) -> None:
        from megarl.rollout.handle import engine_environment

        super().__init__(1, multiprocessing.get_context("spawn"), _import_vllm, (engine_environment(1),))

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        return super().submit(_in_fork, function, *arguments, **options)


def _import_vllm(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    from vllm import LLM  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401


def _in_fork(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:
        return fork.submit(function, *arguments, **options).result()


def open_engine(model: Path, **more: Any) -> LLM:
    from vllm import LLM

    from megarl.models import ModelShape
    from megarl.recipe.device_section import engine_choices

    chosen, needed = engine_choices(ModelShape.from_directory(model))
    common: dict[str, Any] = dict(
        dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True,
        enable_prefix_caching=False, kv_cache_memory_bytes=16 << 20, logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )  # fmt: skip
    return LLM(model=str(model), **(common | chosen | needed | more))


def open_receiver(model: Path, **more: Any) -> LLM:
    """An engine that takes versions, as those of a run do."""
    from megarl.rollout.plugin import BACKEND

    return open_engine(
        model, distributed_executor_backend="uni", weight_transfer_config={"backend": BACKEND},
        worker_extension_cls="megarl.rollout.worker_extension.WorkerExtension", **more,
    )  # fmt: skip


def close_engines() -> None:
    """The next model may need other process groups."""
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


class Receiving:
    """Rank 0's view of one such engine, which receives in a thread."""

    def __init__(self, engine: LLM) -> None:
        self._engine, self._thread = engine, ThreadPoolExecutor(1)
        self._call: Future[Any]

    def ask(self, version: int, engines: Sequence[int]) -> None:
        """`pause` asks."""

    def pause(self, version: int, attempt: int, engines: Sequence[int]) -> list[int]:
        return [0]

    def begin(self, manifest: WeightManifest) -> None:
        self._call = self._thread.submit(self._receive, manifest)

    def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
        return (), {"sync/received_bytes": self._call.result()["received_bytes"]}

    def _receive(self, manifest: WeightManifest) -> dict[str, float]:
        """Raises SyncError where the worker says that it took no version."""
        from megarl.rollout.engine import worker_reports

        taken = self._engine.collective_rpc("megarl_take_weights", args=(manifest.as_dict(), 0))
        [report] = worker_reports(taken, manifest.version)
        return report
