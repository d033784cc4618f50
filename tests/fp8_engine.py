"""A vLLM engine in this process that holds its linear weights in FP8 blocks and takes versions of two models, for a test.

vLLM has block kernels for GPUs and for CPUs with AMX tiles; here one of plain torch stands in, so that all else, vLLM's
layers and parameters too, is real. Prints what it sampled as JSON.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


def reference_kernel() -> type:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    from megarl.sync.codec import Blocks, dequantise_blocks

    class ReferenceKernel(Fp8BlockScaledMMLinearKernel):
        """Products with the dequantised weights."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
            return torch.nn.functional.linear(A, dequantise_blocks(Blocks(B, Bs)).to(A.dtype))

    return ReferenceKernel


def main(old: Path, new: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from megarl.family import ModelShape
    from megarl.reshard.boxes import Layout, RolloutLayout
    from megarl.rollout.engine import QUANTIZATIONS
    from megarl.rollout.plugin import BACKEND
    from megarl.sync.publish import EngineFacts, SyncSettings, WeightSync
    from tests.rollout_cases import megatron_shards

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [reference_kernel()]
    engine = LLM(
        str(old), dtype="bfloat16", quantization=QUANTIZATIONS["fp8"], enforce_eager=True, max_model_len=64,
        skip_tokenizer_init=True, kv_cache_memory_bytes=32 << 20, weight_transfer_config={"backend": BACKEND},
        distributed_executor_backend="uni",
        worker_extension_cls="megarl.rollout.receiver.WorkerReport", enable_prefix_caching=False,
    )  # fmt: skip
    shape = ModelShape.from_directory(old)
    settings = SyncSettings(torch.bfloat16, RolloutLayout(), 1, 1 << 17, 60.0, quantization="fp8")
    sync = WeightSync(shape, Layout(), settings, "fp8", 0, None)

    class Engines:
        """Rank 0's view of the engine, which receives in a thread."""

        def __init__(self) -> None:
            self.thread = ThreadPoolExecutor(1)
            self.call: Future[Any]

        def pause(self, version: int, attempt: int, engines: Any) -> list[EngineFacts]:
            return [EngineFacts("here", 0)]

        def begin(self, manifest: Any) -> None:
            request = WeightTransferUpdateRequest({"manifest": manifest.as_dict(), "engine": 0})
            self.call = self.thread.submit(engine.update_weights, request)

        def failed(self) -> list[int]:
            return [0] if self.call.done() and self.call.exception() is not None else []

        def finish(self) -> tuple[tuple[int, ...], dict[str, float]]:
            self.call.result()
            return (), {}

    def sample() -> list[Any]:
        prompts = [{"prompt_token_ids": list(range(3 + n, 9 + 2 * n))} for n in range(4)]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, detokenize=False))
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        logprobs = [
            [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)]
            for one in outputs
        ]
        return [tokens, logprobs]

    engines, found = Engines(), {"loaded": sample()}
    engine.start_weight_update()
    for version, (name, model) in enumerate((("new", new), ("back", old)), start=1):
        figures = sync.publish(version, megatron_shards(model, Layout())[0], engines)
        found[name] = sample()
    sync.close()
    print(json.dumps(found | {"bound_bytes": figures["sync/bound_bytes"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
