"""Which experts the tokens of each request chose, recorded in a vLLM worker.

vLLM's own recording (`enable_return_routed_experts`) needs its second model runner, which needs Triton, and so no CPU has it
(vLLM 0.32). This one serves the first model runner: routers hand over what they chose, and the scheduler's output says whose
rows those are. Prompts must not be taken from the prefix cache, whose tokens pass no router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

# Of an answer: bytes travel between vLLM's processes as they are.
Recorded = tuple[bytes, tuple[int, ...]]


class RoutingRecorder:
    """Stands between a worker and its model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._execute = runner, runner.execute_model
        self._chosen: dict[int, torch.Tensor] = {}  # layer -> [rows, experts a token], of the pass that runs
        self._requests: dict[str, list[tuple[int, np.ndarray]]] = {}  # first token, [tokens, layers, experts a token]
        self._batch = ""
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                assert isinstance(module.router, BaseRouter), f"{type(module.router).__name__} tells nobody what it chose"
                module.router.set_capture_fn(self._capture(module.layer_id))
                count = module.router.global_num_experts
                self._dtype = np.dtype(np.uint8 if count <= 256 else np.int16)
        runner.execute_model = self._run

    def take(self, request: str) -> Recorded:
        """Experts of a request's tokens, and their shape [tokens, layers, experts a token]; `request` without what vLLM adds
        to it."""
        parts = self._requests.pop(request)
        covered = 0
        for start, part in parts:
            assert start <= covered, f"tokens {covered} to {start} of request {request} passed no router"
            covered = start + len(part)
        whole = np.empty((covered, *parts[0][1].shape[1:]), self._dtype)
        for start, part in parts:  # one that was put off begins anew, and its later pass is the one that sampled
            whole[start : start + len(part)] = part[: covered - start]
        return whole.tobytes(), whole.shape

    def _capture(self, layer: int) -> Any:
        def keep(chosen: torch.Tensor) -> None:
            self._chosen[layer] = chosen

        return keep

    def _run(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._chosen = {}
        result = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return result

    def _keep(self, scheduled: Any) -> None:
        layers = [self._chosen[layer] for layer in sorted(self._chosen)]
        rows = torch.stack(layers, 1).cpu().numpy().astype(self._dtype)  # [rows, layers, experts a token]
        cached = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        at = 0
        for request in self._runner.input_batch.req_ids:  # the order of the rows
            count = scheduled.num_scheduled_tokens[request]
            name = _without_suffix(request)
            if (batch := name.split("-")[0]) != self._batch:
                self._batch, self._requests = batch, {}  # whoever did not fetch the last one never will
            self._requests.setdefault(name, []).append((starts[request], rows[at : at + count]))
            at += count
        assert at == len(rows), f"{at} tokens scheduled, {len(rows)} routed"


def _without_suffix(request: str) -> str:
    """The name that megarl gave (batch-position-member); vLLM adds a random word."""
    return "-".join(request.split("-")[:3])


def from_answer(answer: Recorded) -> np.ndarray:
    """What `take` recorded. The number format follows from the size, as msgpack has no arrays."""
    content, shape = answer
    size = len(content) // int(np.prod(shape))
    return np.frombuffer(content, {1: np.uint8, 2: np.int16}[size]).reshape(shape)


def of_sequence(recorded: np.ndarray, tokens: int) -> np.ndarray:
    """The rows of a sequence of `tokens`: its last token was never fed, or only because the engine ran ahead.

    Raises ValueError where tokens are missing."""
    if len(recorded) < tokens - 1:
        raise ValueError(f"{len(recorded)} of {tokens - 1} tokens have recorded experts")
    return recorded[: tokens - 1]


def layers_with_experts(recorded: np.ndarray | None, layers: Sequence[int]) -> np.ndarray:
    """Of all layers' rows [tokens, layers, experts a token], as vLLM records them, those of `layers`. Raises ValueError
    where it recorded none."""
    if recorded is None:
        raise ValueError("vLLM recorded no experts")
    return np.ascontiguousarray(recorded[:, list(layers)])
