"""A broken recipe is answered with every fault at once, exit status 2, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.recipe import RecipeError, load_recipe
from tests.recipe_cases import edited, refusals, refusals_of, write


def functions_of_statistics() -> list[dict[str, str]]:
    names = ("_sum", "größe", "mean", "mean", "environment", "http_num_late", "http_num", "exact")
    return [{"kind": "function", "target": f"statistics:{name}"} for name in names]


WITHOUT_CRITIC: list[tuple[str, Any]] = [
    ("algorithm.advantage", "grpo"), ("algorithm.gae", ...), ("algorithm.value_loss", ...), ("critic", ...),
    ("phases.critic_value", ...), ("phases.critic_update", ...),
]  # fmt: skip

# name: (what is in the file, {key of a violation: a text its rule or way out must contain})
BROKEN: dict[str, tuple[str | Callable[[], dict], dict[str, str]]] = {
    "typos in keys": (
        edited(("actor.optimizer.lrr", 1e-5), ("group_size", 4), ("data.max_prompt_token", 3), ("xyzzy", 1)),
        {"actor.optimizer.lrr": "actor.optimizer.lr", "group_size": "algorithm.group_size",
         "data.max_prompt_token": "data.max_prompt_tokens", "xyzzy": "one of run, model"}),
    "missing keys and sections": (
        edited(("model", ...), ("actor.optimizer", ...), ("phases.actor_update.mini_batch", ...),
               ("data.prompts.task", ...)),
        {"model": "required", "actor.optimizer": "required", "phases.actor_update.mini_batch": "required",
         "data.prompts.task": "required"}),
    "a critic that is too short for the sequences": (
        edited(("critic.path", "short")),
        {"rollout.max_new_tokens": "the critic's model has 16 positions"}),
    "FP8 on narrow weights": (
        edited(("trainer.fp8", "delayed"), ("trainer.precision", "bf16"), ("model.path", "thin")),
        {"actor.layout.tensor": "feed-forward rows 12"}),
    "nothing left to train": (
        edited(("actor.freeze", {"embedding": True, "head": True, "norms": True, "layers": 4}),
               ("critic.freeze", {"head": True, "layers": 5})),
        {"actor.freeze.layers": "nothing is left", "critic.freeze.head": "new", "critic.freeze.layers": "4"}),
    "a tied head without its embedding": (
        edited(("actor.freeze", {"head": True}), ("model.path", "bound")),
        {"actor.freeze.head": "actor.freeze.embedding: true"}),
    "tensor does not divide heads": (
        edited(("actor.layout.tensor", 3), ("trainer.ranks", 6), ("rollout.tensor", 3)),
        {"actor.layout.tensor": "legal: 1, 2, 4", "rollout.tensor": "4 attention heads 2"}),
    "pipeline does not divide layers": (
        edited(("actor.layout.pipeline", 3), ("trainer.ranks", 12), ("phases.rollout.prompts", 8)),
        {"actor.layout.pipeline": "4 layers 2, or actor.layout.stages: [1, 2, 1]"}),
    "stages that do not hold the layers": (
        edited(("actor.layout", {"tensor": 2, "pipeline": 2, "stages": [1, 2]})),
        {"actor.layout.stages": "sum to 3, and the model has 4 layers [2, 2]"}),
    "a layout, an optimizer and a device that do not go together with themselves": (
        edited(("reference", {"layout": {"pipeline": 2, "stages": [4]}}),
               ("critic.layout", {"tensor": 2, "stages": [4], "virtual_pipeline": 2}),
               ("actor.layout", {"tensor": 1, "sequence_parallel": True}), ("trainer.fp8", "delayed"),
               ("trainer.initial_loss_scale", 2.0), ("actor.optimizer.min_lr_share", 0.1),
               ("actor.lora", {"rank": 8, "alpha": 1.0, "targets": ["qkv", "fc2", "qkv"]}),
               ("algorithm.kl.coefficient", 0.0), ("algorithm.kl.adaptive", {"target": 0.01}), ("algorithm.overlong", {}),
               ("algorithm.mismatch", {"correction": "truncate", "floor": 0.5})),
        {"reference.layout.stages": "has 1 numbers; pipeline 2 x virtual_pipeline 1 = 2 chunks need one each",
         "critic.layout.virtual_pipeline": "layout.pipeline is 1 1",
         "actor.layout.sequence_parallel": "layout.tensor is 1 false", "trainer.fp8": "trainer.precision: bf16",
         "trainer.initial_loss_scale": "only fp16", "actor.optimizer.min_lr_share": "decay: cosine",
         "actor.lora.targets": "twice [qkv, fc2]", "algorithm.kl.adaptive": "0 and stays 0",
         "algorithm.mismatch.floor": "truncate has no lower bound 0, or correction: clip or mask",
         "algorithm.overlong": "neither masks"}),
    "experts of a model without any": (
        edited(("actor.layout", {"tensor": 2, "pipeline": 2, "expert": 2}),
               ("reference", {"layout": {"tensor": 2, "expert_tensor": 1}})),
        {"actor.layout.expert": "the model of the actor has no experts remove actor.layout.expert",
         "reference.layout.expert_tensor": "no experts remove reference.layout.expert_tensor"}),
    "experts that are cut by what does not divide them": (
        edited(("model.path", "experts"), ("trainer.ranks", 48), ("phases.rollout.prompts", 48),
               ("phases.critic_update.mini_batch", 48), ("phases.actor_update.mini_batch", 48),
               ("actor.layout", {"expert": 6}),
               ("reference", {"layout": {"tensor": 2, "sequence_parallel": True, "expert_tensor": 8}}),
               ("critic.layout", {"tensor": 4, "expert": 8, "sequence_parallel": False})),
        {"actor.layout.expert": "must divide the model's 8 experts 4",
         "reference.layout.expert_tensor": "must divide the 36 feed-forward rows of an expert 6",
         "critic.layout.expert": "expert 8 x expert_tensor 4 = 32 must divide the 48 ranks of a stage",
         "critic.layout.sequence_parallel": "each tensor rank sends its own tokens to the experts true"}),
    "a reference that does not exist, and layouts of a critic that is smaller": (
        edited(("reference", {"path": "tinyy"}), ("model.path", "deep"), ("critic.path", "tiny"),
               ("actor.layout", {"pipeline": 8}), ("phases.actor_logprob.micro_batch.max_tokens", 64)),
        {"reference.path": "not found", "actor.layout.pipeline": "must divide the model's 4 layers 4"}),
    "mini-batches do not divide": (
        edited(("phases.actor_update.mini_batch", 6), ("phases.critic_update.mini_batch", 1)),
        {"phases.actor_update.mini_batch": "divide the 16", "phases.critic_update.mini_batch": "data-parallel size 2"}),
    "batch does not divide over the ranks": (
        edited(("trainer.ranks", 32), ("phases.rollout.prompts", 6), ("phases.critic_update.mini_batch", 12)),
        {"phases.rollout.prompts": "12 rollouts must divide over", "phases.actor_update.mini_batch": "divide the 12",
         "phases.critic_update.mini_batch": "size 8 (layout of the critic) a legal phases.rollout.prompts first"}),
    "caps under the longest sequence": (
        edited(("phases.actor_update.micro_batch.max_tokens", 63), ("phases.critic_value.micro_batch.max_tokens", 1)),
        {"phases.actor_update.micro_batch.max_tokens": "32 + rollout.max_new_tokens 32 = 64",
         "phases.critic_value.micro_batch.max_tokens": "64"}),
    "a cap under the longest sequence with its padding": (
        edited(("actor.layout", {"tensor": 4, "sequence_parallel": True}), ("data.max_prompt_tokens", 33),
               ("phases.actor_update.micro_batch.max_tokens", 65)),
        {"phases.actor_update.micro_batch.max_tokens": "padded to 68"}),
    "adapters wider than the weights": (
        edited(("actor.lora", {"rank": 65, "alpha": 1, "targets": ["qkv", "fc2"]})),
        {"actor.lora.rank": "must not pass 64"}),
    "adapters of experts": (
        edited(("model.path", "experts"), ("actor.layout", {"pipeline": 2}),
               ("actor.lora", {"rank": 2, "alpha": 1.0, "targets": ["fc1", "qkv"]})),
        {"actor.lora.targets": "experts get no adapters qkv"}),
    "layouts that do not divide the ranks": (
        edited(("critic.layout", {"tensor": 3, "pipeline": 2}), ("reference", {"layout": {"tensor": 4, "pipeline": 4}}),
               ("actor.layout", {"tensor": 2, "context": 3})),
        {"critic.layout.tensor": "legal: 1, 2, 4",
         "critic.layout.pipeline": "tensor 3 x context 1 x pipeline 2 = 6 must divide trainer.ranks = 8",
         "reference.layout.pipeline": "pipeline 4 = 16 must divide trainer.ranks = 8 2, or trainer.ranks: 16",
         "actor.layout.pipeline": "tensor 2 x context 3 x pipeline 1 = 6 must divide trainer.ranks = 8"}),
    # Each sequence is padded to 2 chunks a context rank, each of them to the tensor ranks: 65 tokens to 72.
    "a cap under the longest sequence with the padding of its context ranks": (
        edited(("actor.layout", {"tensor": 2, "context": 2, "sequence_parallel": True}), ("data.max_prompt_tokens", 33),
               ("phases.actor_update.micro_batch.max_tokens", 71)),
        {"phases.actor_update.micro_batch.max_tokens": "padded to 72"}),
    "prompts that context ranks have in parts": (
        edited(("critic.layout", {"context": 2}), ("phases.critic_update.share_prompts", True),
               ("phases.actor_update.share_prompts", True)),
        {"phases.critic_update.share_prompts": "critic.layout.context = 2 ranks share each sequence false"}),
    "virtual pipelines that cut nothing": (
        edited(("actor.layout", {"tensor": 2, "pipeline": 2, "virtual_pipeline": 3})),
        {"actor.layout.virtual_pipeline": "pipeline 2 x virtual_pipeline 3 = 6 must divide the model's 4 layers 2"}),
    # 4 stages on 8 ranks leave 2 data-parallel ranks, so each needs 4, 8, ... micro-batches of its 8, 2 or 6 sequences.
    "counts that a virtual pipeline cannot run": (
        edited(("actor.layout", {"tensor": 1, "pipeline": 4, "virtual_pipeline": 1}),
               ("critic.layout", {"tensor": 1, "pipeline": 4, "virtual_pipeline": 2}), ("model.path", "deep"),
               ("phases.rollout.prompts", 12), ("phases.critic_update", {"mini_batch": 4, "micro_batch": {"sequences": 1}}),
               ("phases.critic_value.micro_batch", {"sequences": 5})),
        {"phases.critic_update.mini_batch": "runs micro-batches by its 4 stages (layout of the critic) 8",
         "phases.critic_value.micro_batch.sequences": "a rank into 3 micro-batches"}),
    "a cap that can need more micro-batches than a virtual pipeline has": (
        edited(("actor.layout.virtual_pipeline", 2), ("phases.rollout.prompts", 6), ("phases.actor_update.mini_batch", 6),
               ("phases.critic_update", {"mini_batch": 12, "micro_batch": {"max_tokens": "auto"}}),
               ("device", {"memory_gib": 8})),
        {"phases.actor_update.micro_batch.max_tokens": "can need more than 2 micro-batches"}),
    "a batch of fewer sequences than a virtual pipeline runs at once": (
        edited(("actor.layout.virtual_pipeline", 2), ("trainer.ranks", 64), ("phases.actor_update.mini_batch", 16),
               ("phases.actor_logprob", ...)),
        {"phases.rollout.prompts": "actor 16 x 2, reference 16 x 2, critic 16 x 2 16",
         "phases.actor_update.mini_batch": "each of 16 data-parallel ranks 1",
         "phases.critic_update.mini_batch": "each of 16 data-parallel ranks 1"}),
    "an automatic cap without a device": (
        edited(("phases.actor_update.micro_batch.max_tokens", "auto"), ("device", {})),
        {"device.memory_gib": "required"}),
    "an automatic cap without memory": (
        edited(("phases.actor_update.micro_batch.max_tokens", "auto"), ("device", {"memory_gib": 1e-3})),
        {"rollout.kv_cache_bytes": "of 0.001 GiB an engine's worker may take",
         "phases.actor_update.micro_batch.max_tokens": "one sequence of 64 tokens, with everything else on the device"}),
    "a reference that nothing reads": (
        edited(("algorithm.kl", None), ("phases.reference_logprob", ...), ("reference", {"layout": {"tensor": 2}})),
        {"reference": "without algorithm.kl or run.kind: dpo nothing reads the reference"}),
    "both micro-batch rules and none": (
        edited(("phases.actor_update.micro_batch.sequences", 2), ("phases.critic_value.micro_batch", {}),
               ("phases.reference_logprob.micro_batch", 4)),
        {"phases.actor_update.micro_batch": "exactly one of", "phases.critic_value.micro_batch": "exactly one of",
         "phases.reference_logprob.micro_batch": "section"}),
    "critic without PPO": (
        edited(("algorithm.advantage", "grpo"), ("algorithm.group_size", 1), ("phases.rollout.prompts", 16)),
        {"algorithm.group_size": "at least two", "critic": "gae (PPO)", "algorithm.gae": "gae (PPO)",
         "algorithm.value_loss": "gae (PPO)", "phases.critic_value": "never runs", "phases.critic_update": "never runs"}),
    "algorithms that do not go together": (
        edited(("algorithm.group", {"deviation": False}), ("algorithm.policy_loss", {"kind": "gmpo"}),
               ("algorithm.mismatch", {"correction": "mask"}), ("algorithm.overlong", {"buffer": 100_000})),
        {"algorithm.group": "how grpo compares", "algorithm.policy_loss.kind": "one advantage a sequence",
         "algorithm.mismatch.level": "each is the whole sequence's sequence or geometric",
         "algorithm.overlong.buffer": "rollout.max_new_tokens"}),
    "stale tokens without importance weights, and without the proximal policy": (
        edited(("rollout.max_staleness", 2), ("phases.actor_update.mini_batch", 16), ("phases.actor_logprob", ...),
               ("weight_sync", {"in_flight": "keep"})),
        {"algorithm.mismatch": "rollout.max_staleness = 2: older weights than the trainer's sample the tokens",
         "phases.actor_logprob": "rollout.max_staleness > 0"}),
    "stale tokens of a loss of whole sequences": (
        edited(("rollout.max_staleness", 2), ("weight_sync", {"in_flight": "keep"}), *WITHOUT_CRITIC,
               ("algorithm.policy_loss", {"kind": "gmpo"})),
        {"algorithm.mismatch": "mismatch: {correction: truncate, level: sequence}"}),
    "a pattern that is none, and a schema that is none": (
        edited(("reward", [{"kind": "pattern", "pattern": "(a"},
                           {"kind": "json_schema", "json_schema": {"type": "objekt"}}])),
        {"reward.0.pattern": "no regular expression", "reward.1.json_schema": "type: 'objekt' is not valid"}),
    "functions whose names are no metrics, or others": (
        edited(("reward", [{"kind": "http", "url": "http://judge/"}, *functions_of_statistics(), {"kind": "exact"}])),
        {"reward.1.target": "reward/_sum is no name", "reward.2.target": "reward/größe",
         "reward.3.target": "reward/mean is no name", "reward.5.target": "reward/environment is",
         "reward.6.target": "reward/http_num_late is no name"}),
    "PPO without critic": (
        edited(("critic", ...), ("algorithm.gae", None), ("algorithm.value_loss", ...), ("phases.critic_value", ...),
               ("phases.critic_update", ...)),
        {"critic": "required", "algorithm.gae": "required", "algorithm.value_loss": "required",
         "phases.critic_value": "required", "phases.critic_update": "required"}),
    "sections of phases that never run": (
        edited(("algorithm.kl", None), ("phases.actor_update.mini_batch", 16)),
        {"phases.reference_logprob": "never runs", "phases.actor_logprob": "never runs"}),
    "no section for phases that run": (
        edited(("phases.reference_logprob", ...), ("phases.actor_logprob", ...)),
        {"phases.reference_logprob": "required", "phases.actor_logprob": "required"}),
    "missing models": (
        edited(("model.path", "models/SmolLM2-135M-Instruct"), ("critic.path", "tinyy")),
        {"model.path": "make quickstart", "critic.path": "not found"}),
    "models megarl cannot run": (
        edited(("model.path", "gpt2"), ("critic.path", "torn")),
        {"model.path": "model_type = 'gpt2'", "critic.path": "cannot be used"}),
    "model too small for the sequences": (
        edited(("data.max_prompt_tokens", 250), ("phases.actor_update.micro_batch.max_tokens", 512),
               ("rollout.kv_cache_bytes", 9)),
        {"rollout.max_new_tokens": "256 positions", "phases.actor_logprob.micro_batch.max_tokens": "282",
         "phases.critic_value.micro_batch.max_tokens": "282", "rollout.kv_cache_bytes": "282 tokens"}),
    "unknown kinds": (
        edited(("data.prompts.kind", "json"), ("reward.0.kind", "last_numbers"), ("reward.1.kind", ...)),
        {"data.prompts.kind": "jsonl", "reward.0.kind": "last_number", "reward.1.kind": "required"}),
    "prompts that are not there": (
        edited(("data.prompts", {"kind": "jsonl", "path": "qa.json", "prompt_field": "q", "answer_field": "a"}),
               ("data.system_prompt", "Be brief."), ("data.chat_template", False), ("rollout.replay", "nowhere")),
        {"data.prompts.path": "qa.jsonl", "data.system_prompt": "chat_template", "rollout.replay": "does not exist"}),
    "texts of the wrong form": (
        edited(("data.prompt_template", "Solve it."), ("reward.1.target", "rewards.length"), ("run.name", "a/b")),
        {"data.prompt_template": "{question}", "reward.1.target": "module:function", "run.name": "a-b"}),
    # Neither fault makes the reference phase look needless, nor the critic phases look as if they lacked a critic.
    "no rule runs on a guess": (
        edited(("algorithm.kl", 3), ("critic", "small")),
        {"algorithm.kl": "section", "critic": "section"}),
    "a misspelt section is not an absent one": (
        edited(("algorithm.kl", ...), ("algorithm.kll", {"place": "loss", "coefficient": 0.1, "estimator": "k3"})),
        {"algorithm.kll": "algorithm.kl"}),
    "dynamic sampling of groups of one, from a replay, and dumps of it": (
        edited(("algorithm.dynamic_sampling", {}), ("algorithm.advantage", "statistics:mean"), ("algorithm.group_size", 1),
               ("algorithm.gae", ...), ("algorithm.value_loss", ...), ("critic", ...), ("phases.critic_value", ...),
               ("phases.critic_update", ...), ("phases.actor_update.mini_batch", 4), ("run.dump_rollouts", True),
               ("rollout.replay", ".")),
        {"algorithm.group_size": "2", "algorithm.dynamic_sampling": "rollout.replay has the completions of",
         "run.dump_rollouts": "telemetry.samples_per_step"}),
    "a critic that warms up for ever": (
        edited(("critic.warmup_steps", 3)),
        {"critic.warmup_steps": "must be below run.steps = 3"}),
    "no steps left for the learning rate's warm-up": (
        edited(("critic.warmup_steps", 2), ("actor.optimizer.warmup_steps", 2)),
        {"actor.optimizer.warmup_steps": "run.steps = 3 - critic.warmup_steps = 1"}),
    "a reference that has nothing to take from adapters": (
        edited(("reference", {"refresh_every": 2}), ("actor.lora", {"rank": 4, "alpha": 8.0})),
        {"reference.refresh_every": "stay as they are"}),
    "a reference without weights that could be offloaded": (
        edited(("reference", {"memory": {"offload": "all"}}), ("actor.lora", {"rank": 4, "alpha": 8.0}),
               ("actor.memory", {"offload": "all"})),
        {"reference.memory.offload": "no weights of its own none, or remove reference.memory"}),
    "a reference of another layout cannot take the actor's shards": (
        edited(("reference", {"refresh_every": 2, "layout": {}})),
        {"reference.layout": "is not actor.layout remove reference.layout, or remove reference.refresh_every"}),
    "a reference of another model cannot take the actor's weights": (
        edited(("reference", {"refresh_every": 2, "path": "bound"})),
        {"reference.refresh_every": "is another model"}),
    "no reward at all": (edited(("reward", [])), {"reward": "empty"}),
    "not YAML": ("run: {name: [", {"recipe": "not valid YAML"}),
    "wrong types": (
        edited(("run.steps", "3"), ("trainer.ranks", 8.0), ("run.dump_rollouts", "yes"), ("run.name", 7),
               ("reward", "exact"), ("run.seed", True), ("rollout.engines", None),
               ("algorithm.kl.coefficient", float("inf")), ("phases.actor_update.micro_batch.max_tokens", "automatic"),
               ("phases.critic_value.micro_batch.max_tokens", "256")),
        {"run.steps": "3", "trainer.ranks": "8", "run.dump_rollouts": "true", "run.name": '"7"',
         "reward": "must be a valid list", "run.seed": "1", "rollout.engines": "integer",
         "algorithm.kl.coefficient": "finite",
         "phases.actor_update.micro_batch.max_tokens": "must be a whole number or auto auto",
         "phases.critic_value.micro_batch.max_tokens": "must be a whole number or auto 256"}),
    "out of range": (
        edited(("run.steps", 0), ("actor.optimizer.lr", 0.0), ("actor.optimizer.beta1", 1.0), ("rollout.temperature", -1.0),
               ("critic.optimizer.min_lr_share", 1.1), ("algorithm.dynamic_sampling", {"max_rounds": 1}),
               ("algorithm.early_stop", {"target_kl": 0.0}), ("phases.actor_logprob.micro_batch.max_tokens", 0)),
        {"run.steps": "equal to 1 1", "actor.optimizer.lr": "greater than 0", "actor.optimizer.beta1": "less than 1",
         "rollout.temperature": "equal to 0.01", "critic.optimizer.min_lr_share": "less than or equal to 1",
         "algorithm.dynamic_sampling.max_rounds": "equal to 2", "algorithm.early_stop.target_kl": "greater than 0",
         "phases.actor_logprob.micro_batch.max_tokens": "must be greater than or equal to 1"}),
    "unknown words": (
        edited(("algorithm.kl.estimator", "k4"), ("trainer.precision", "fp12"), ("algorithm.aggregation", "tokens_mean"),
               ("actor.memory", {"recompute": "all", "offload": "weights"}), ("actor.freeze", {"layer": 3}),
               ("actor.lora", {"rank": 65, "alpha": 0, "targets": ["qkv", "fc3", "qkv"]}),
               ("actor.optimizer.overlap_parameters", True), ("critic.optimizer.overlap_parameters", True)),
        {"algorithm.kl.estimator": "'k1', 'k2', 'k3'", "trainer.precision": "fp32", "algorithm.aggregation": "token_mean",
         "actor.memory.recompute": "'none', 'selective' or 'full'", "actor.memory.offload": "all",
         "actor.freeze.layer": "layers", "actor.lora.alpha": "greater than 0", "actor.lora.targets.1": "fc1",
         "actor.optimizer.overlap_parameters": "optimizer.overlap_gradients: true",
         "critic.optimizer.overlap_parameters": "optimizer.overlap_gradients: true"}),
    "a run without GPUs": (
        edited(("rollout.quantization", "fp8"), ("trainer.fp8", "mxfp8"), ("trainer.precision", "bf16"),
               ("actor.layout.tensor", 1), ("device", {"memory_gib": 64.0, "kind": "cpu"})),
        {"rollout.quantization": "the run is on CPUs", "trainer.fp8": "device.kind is cpu"}),
    "keys that have no effect in this run": (
        edited(("algorithm.early_stop", {"target_kl": 0.01}),
               ("algorithm.policy_loss", {"kind": "function", "target": "nowhere_to_be_found:loss"}),
               ("data.prompts.task", "chain_sums"), ("actor.optimizer.warmup_steps", 4)),
        {"algorithm.early_stop": "of 2 updates a step none can be skipped",
         "algorithm.policy_loss.target": "no module 'nowhere_to_be_found'", "data.prompts.task": "chain_sum",
         "actor.optimizer.warmup_steps": "run.steps = 3"}),
    "a weight sync that cannot work": (
        edited(("weight_sync", {"transport": "mapped", "wire": "delta", "bucket_bytes": 300, "in_flight": "keep",
                                "canary": {"tokens": 4096}}),
               ("actor.router_replay", True)),
        {"weight_sync.wire": "weight_sync.transport: group", "weight_sync.bucket_bytes": "must hold a row",
         "weight_sync.in_flight": "chose under two versions wait or abort",
         "weight_sync.canary.tokens": "below the longest sequence of a rollout",
         "actor.router_replay": "the model has no experts"}),
    "adapters alone, and settings of weights on their way": (
        edited(("actor.lora", {"rank": 4, "alpha": 8.0, "send": "adapter"}), ("rollout.quantization", "fp8"),
               ("weight_sync", {"transport": "group", "wire": "delta", "bucket_bytes": 1 << 20}),
               ("trainer.precision", "bf16"), ("rollout.engine_args", {"max_lora_rank": 8})),
        {"weight_sync.transport": "none do auto, or actor.lora.send: merged",
         "weight_sync.wire": "none do full, or actor.lora.send: merged",
         "weight_sync.bucket_bytes": "none do null, or actor.lora.send: merged",
         "rollout.quantization": "without the adapters", "rollout.engine_args.max_lora_rank": "actor.lora.rank"}),
    "adapters alone of a model with experts, on CPUs": (
        edited(("model.path", "experts"), ("actor.layout", {"pipeline": 2}), ("device", {"memory_gib": 64.0, "kind": "cpu"}),
               ("actor.lora", {"rank": 2, "alpha": 1.0, "targets": ["qkv"], "send": "adapter"})),
        {"actor.lora.send": "the run is on CPUs merged"}),
    "only a comment": ("# nothing yet\n", {"recipe": "empty"}),
    "a list": ("- run\n- model\n", {"recipe": "list"}),
    "one word": ("grpo", {"recipe": "str"}),
    "control characters": ("run: \x00\n", {"recipe": "not valid YAML"}),
    "code in YAML": ("run: !!python/object/apply:os.getcwd []\n", {"recipe": "not valid YAML"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_is_named_at_once(name: str, folder: Path) -> None:
    content, expected = BROKEN[name]
    refused = refusals_of(content)
    assert refused.keys() == expected.keys()
    assert {key: refused[key] for key, text in expected.items() if text not in refused[key]} == {}


@pytest.mark.parametrize("name", ["typos in keys", "critic without PPO", "not YAML"])
def test_check_prints_every_fault(name: str, folder: Path) -> None:
    content, expected = BROKEN[name]
    result = CliRunner().invoke(app, ["check", str(write(folder, content))])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit) and "Traceback" not in result.output
    assert [key for key in expected if f"{key} = " not in result.output] == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.steps", "override"), ("=3", "override"), ("run..steps=3", "override"), ("run.steps=[1", "run.steps"),
        ("run.name.first=x", "run.name.first"), ("reward.7.kind=exact", "reward.7"),
        ("reward.first.kind=exact", "reward.first"), ("run.stepz=3", "run.stepz"), ("run.steps=three", "run.steps"),
    ],
)  # fmt: skip
def test_a_broken_override_is_a_violation(override: str, key: str, folder: Path) -> None:
    assert refusals(("trainer.ranks", 0), overrides=[override]).keys() == {key, "trainer.ranks"}


def test_a_missing_file_is_a_violation_with_the_file_that_was_meant(folder: Path) -> None:
    write(folder, edited())
    result = CliRunner().invoke(app, ["check", "recipe.yml", "bad"])
    assert result.exit_code == 2
    assert "does not exist" in result.output and "recipe.yaml" in result.output
    assert "override = 'bad'" in result.output
    assert CliRunner().invoke(app, ["check", "."]).exit_code == 2


def test_bytes_that_are_no_text_are_a_violation(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(b"run: \xff\xfe\n")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe("recipe.yaml")


def test_train_refuses_what_check_refuses(folder: Path) -> None:
    """In a process of its own, as a user runs it."""
    file = write(folder, edited(("trainer.ranks", 0), ("run.steps", 0)))
    command = [sys.executable, "-m", "megarl.cli", "train", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert result.returncode == 2
    assert "trainer.ranks" in result.stderr and "run.steps" in result.stderr
    assert "Traceback" not in result.stderr
