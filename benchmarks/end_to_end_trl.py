"""One run of TRL's GRPOTrainer for `benchmarks/end_to_end.py`, which starts it with TRL on the path.

    python benchmarks/end_to_end_trl.py SETTINGS.json

Reads what `end_to_end.py` wrote of the task and writes a line of JSON for each step to `settings["steps_file"]`: seconds by
phase, tokens and the mean reward. TRL's own methods are timed from outside; nothing of what they compute is changed, but
for two things of the vLLM mode: the weight sync, whose own loads into tensors that a CPU engine has packed away
(`sync_weights`), and the engine's number format, which TRL leaves to the checkpoint's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from megarl.data.sample import Prompt
from megarl.reward.verifiers import last_number

ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PHASES = ("generation", "logprobs", "update", "sync")


class Clock(TrainerCallback):
    """Seconds of TRL's methods by phase; what is nested in another phase counts there alone, at its innermost."""

    def __init__(self, path: Path) -> None:
        self.path, self.open, self.seconds, self.counts = path, [], dict.fromkeys(PHASES, 0.0), {}
        self.since = self.rewards = None

    def begin(self, phase: str) -> None:
        now = time.perf_counter()
        if self.open:
            self.seconds[self.open[-1][0]] += now - self.open[-1][1]
        self.open.append([phase, now])

    def end(self) -> None:
        now = time.perf_counter()
        phase, began = self.open.pop()
        self.seconds[phase] += now - began
        if self.open:
            self.open[-1][1] = now

    def wrap(self, phase: str, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Between two steps is the trainer's own work (logs): from end to end, as of megarl.
        self.since = self.since or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        line = {"seconds": now - self.since, **self.seconds, **self.counts}
        line["rest"] = line["seconds"] - sum(self.seconds.values())
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.since, self.seconds = now, dict.fromkeys(PHASES, 0.0)


def timed_trainer(clock: Clock) -> type:
    """GRPOTrainer whose methods are timed by `clock`."""

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return clock.wrap("generation", super()._generate_single_turn)(*args, **kwargs)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            method = super()._get_per_token_logps_and_entropies
            return (method if torch.is_grad_enabled() else clock.wrap("logprobs", method))(*args, **kwargs)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super()._generate(*args, **kwargs)
            prompts, completions = outputs[0], outputs[1]
            clock.counts |= {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": sum(map(len, completions)),
                             "slots": len(prompts) * (max(map(len, prompts)) + max(map(len, completions)))}  # fmt: skip
            return outputs

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return clock.wrap("update", super().compute_loss)(*args, **kwargs)

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = super().create_optimizer(*args, **kwargs)
            optimizer.register_step_pre_hook(lambda *_: clock.begin("update"))
            optimizer.register_step_post_hook(lambda *_: clock.end())
            return optimizer

    return Timed


def sync_weights(generation: Any) -> None:
    """In place of VLLMGeneration.sync_weights: vLLM's own reload, which unpacks and packs again layer by layer. The head's
    packed copy, where it is the embedding, it leaves old (vLLM 0.32; see megarl/weight_sync/receiver.py)."""
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    runner.reload_weights(weights_iterator=generation._iter_named_params())
    model = runner.get_model()
    if generation.model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    generation.llm.reset_prefix_cache()


def reward(clock: Clock) -> Callable:
    def last_number_reward(completions: list, answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards = [last_number(text, Prompt(0, None, "", right, {})) for text, right in zip(texts, answer, strict=True)]
        clock.counts["reward"] = sum(rewards) / len(rewards)
        return rewards

    return last_number_reward


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    clock = Clock(Path(settings["steps_file"]))
    rows = [json.loads(line) for line in Path(settings["prompts_file"]).read_text().splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    vllm = settings["side"] == "trl-vllm"
    config = GRPOConfig(
        output_dir=settings["folder"], seed=settings["seed"], max_steps=settings["steps"], report_to=[], save_strategy="no",
        use_cpu=True, bf16=settings["precision"] == "bf16", disable_tqdm=True, logging_steps=1,
        # One update a batch of prompts x group_size completions, in micro-batches.
        per_device_train_batch_size=settings["micro_batch"], num_generations=settings["group_size"],
        gradient_accumulation_steps=settings["prompts"] * settings["group_size"] // settings["micro_batch"],
        max_completion_length=settings["max_new_tokens"], temperature=settings["temperature"], shuffle_dataset=False,
        gradient_checkpointing=settings["checkpointing"],
        # megarl's objective: clip with two bounds, mean over all tokens of the batch, k3 without importance weights.
        loss_type="dapo", epsilon=settings["low"], epsilon_high=settings["high"], beta=settings["kl"],
        use_bias_correction_kl=False, vllm_importance_sampling_correction=False,
        learning_rate=settings["lr"], lr_scheduler_type="constant", weight_decay=settings["weight_decay"],
        adam_beta1=settings["beta1"], adam_beta2=settings["beta2"], adam_epsilon=settings["epsilon"],
        max_grad_norm=settings["grad_clip"],
        use_vllm=vllm, vllm_mode="colocate", vllm_max_model_length=settings["max_model_len"],
        vllm_gpu_memory_utilization=0.3,  # of the host's memory, what the trainer takes included
    )  # fmt: skip
    if vllm:
        vllm_generation.LLM = partial(vllm_generation.LLM, dtype=ENGINE_DTYPES[settings["precision"]])
    # Weights in fp32 under either precision, as megarl's optimizer keeps them: bf16 is mixed precision. GRPOTrainer loads
    # its reference in the same format, by the name of the model.
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    trainer = timed_trainer(clock)(
        model=model, reward_funcs=reward(clock), args=config, train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]), callbacks=[clock],
    )  # fmt: skip
    trainer.accelerator.backward = clock.wrap("update", trainer.accelerator.backward)
    if vllm:
        generation = trainer.vllm_generation
        generation.sync_weights = clock.wrap("sync", lambda: sync_weights(generation))
    trainer.train()
    print("trl: done", flush=True)
    os._exit(0)  # vLLM's threads outlive the trainer


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
