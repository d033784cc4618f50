"""What a run proves of its schedules: the shapes it executed are the planned ones, and metrics.jsonl says so."""

import math
import os
import re
from dataclasses import replace
from unittest import mock

import pytest

from megarl.algorithm.control import logger
from megarl.build import train
from megarl.megatron import role as engine
from megarl.megatron.role import Role
from megarl.recipe import load_recipe
from megarl.reward.workers import RewardWorkers
from megarl.rollout import replay
from megarl.schedule import MicroBatch, PlanMismatch
from megarl.telemetry.run_directory import Resume
from megarl.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import fake_rollouts, metrics_of, replayed_recipe, tiny_recipe, tiny_run

STEPS = 2


def refusal(recipe, *changes):
    """What this rank says of a run that it ends."""
    with pytest.raises((PlanMismatch, ValueError)) as failure:
        train(load_recipe(recipe, changes), Resume.NEVER)
    return str(failure.value)


def train_short_of_a_sequence(recipe):
    """A rank whose engine leaves out the last of four sequences; only reference_logprob has four in a micro-batch."""
    whole = engine.pack

    def short(batch, micro_batch, *rest, **options):
        samples = micro_batch.samples[:3] if len(micro_batch.samples) == 4 else micro_batch.samples
        tokens = int(batch.lengths[list(samples)].sum())
        return whole(batch, MicroBatch(samples, tokens, tokens), *rest, **options)

    with mock.patch.object(engine, "pack", short):
        return refusal(recipe)


def test_an_engine_that_runs_something_else_stops_the_run_with_both_shapes(folder):
    cut = {"micro_batch": {"sequences": 2}}
    recipe = replayed_recipe(folder, "torn", True, 2, 1, 2, STEPS, phases__actor_logprob=cut)
    for message in run_ranks(train_short_of_a_sequence, 2, str(recipe)):
        assert re.search(r"reference_logprob.*planned 4 sequences.*executed 3 sequences", message), message


def train_unlike(recipe):
    """The second rank was given other micro-batches."""
    changes = ["phases.reference_logprob.micro_batch.sequences=2"] if os.environ["RANK"] == "1" else []
    return refusal(recipe, *changes)


def test_ranks_that_would_run_unequal_forward_passes_are_told_both_counts_and_wait_for_nobody(folder):
    recipe = replayed_recipe(folder, "unlike", True, 2, 1, 2, STEPS)
    pattern = (
        r"phase reference_logprob of step 1: rank 0 has planned 4 micro-batches \(mini-batches: 1, plan \w{12}\), and "
        r"rank 1 8 micro-batches"
    )
    for message in run_ranks(train_unlike, 2, str(recipe)):
        assert re.search(pattern, message), message


def train_with_a_value_that_is_no_number(recipe):
    """The critic's last stage gives one of sample 5's values as no number. Returns what each rank says of it."""
    forward = Role.forward

    def broken(engine, batch, mini_batch, adapted=True):
        results, executed = forward(engine, batch, mini_batch, adapted)
        if "values" in results:
            results["values"][5][0] = math.nan
        return results, executed

    with mock.patch.object(Role, "forward", broken):
        return refusal(recipe)


def test_a_result_that_is_no_number_is_named_on_every_rank(folder):
    cut = {"micro_batch": {"sequences": 2}}
    recipe = replayed_recipe(folder, "nan", True, 2, 1, 2, STEPS, phases__critic_value=cut)
    first, second = run_ranks(train_with_a_value_that_is_no_number, 2, str(recipe))
    assert first == second
    assert first.startswith(
        "phase critic_value: values of sample 5 are nan at completion token 0 (micro-batch 2 of data-parallel rank 0, "
        "rank 1; 1 of"
    )


def train_with_a_pass_of_its_own(recipe):
    """The second rank leaves the reference out, in one step: it took another branch."""
    forward, accept = Trainer._forward, Trainer._accept

    def is_left_out(trainer, plan):
        return trainer.rank == 1 and trainer.number == 2 and plan.phase == "reference_logprob"

    def other(trainer, plan, batch, name):
        return None if is_left_out(trainer, plan) else forward(trainer, plan, batch, name)

    def accepting(trainer, plan, batch, name, ran):
        return (batch.fields["logprobs"], batch, {}) if ran is None else accept(trainer, plan, batch, name, ran)

    with mock.patch.object(Trainer, "_forward", other), mock.patch.object(Trainer, "_accept", accepting):
        return refusal(recipe)


def test_ranks_that_part_inside_of_a_step_are_told_both_phases_before_the_next_begins(folder):
    recipe = replayed_recipe(folder, "parted", True, 2, 1, 2, STEPS)
    message = "step 2: rank 0 begins phase reference_logprob, and rank 1 phase critic_value"
    assert run_ranks(train_with_a_pass_of_its_own, 2, str(recipe)) == [message, message]


def train_with_other_sizes(recipe, where):
    """The rollout engines, or the reward workers, are given another size than the recipe's."""
    read, start = replay.read_rollout, RewardWorkers.__init__

    def executing(**sizes):
        def read_other(recipe, prompts, step):
            batch = read(recipe, prompts, step)
            return replace(batch, executed=replace(batch.executed, **sizes))

        return read_other

    def other_rewards(workers, specs, path, stops, section, **more):
        start(workers, specs, path, stops, section.model_copy(update={"sequences": 5}), **more)

    other = {"max_concurrent": (replay, "read_rollout", executing(max_concurrent=7)),
             "reward": (RewardWorkers, "__init__", other_rewards)}  # fmt: skip
    with mock.patch.object(*other[where]):
        return refusal(recipe)


@pytest.mark.parametrize(
    ("where", "pattern"),
    [
        ("max_concurrent", r"rollout: planned \(prompts, rollouts, max_concurrent\) \(4, 16, 9\), executed \(4, 16, 7\)"),
        ("reward", r"reward: planned tasks of \(6, 6, 4\) sequences, executed \(5, 5, 5, 1\)"),
    ],
)
def test_a_size_that_does_not_arrive_at_engines_or_rewards_stops_the_run_with_both(folder, where, pattern):
    """For the trainer's phases: `test_an_engine_that_runs_something_else_stops_the_run_with_both_shapes`."""
    changes = {"phases__reward": {"sequences": 6}, "phases__rollout": {"prompts": 4, "max_concurrent": 9}}
    recipe = replayed_recipe(folder, f"other-{where}", False, 1, 1, 1, STEPS, **changes)
    (message,) = run_ranks(train_with_other_sizes, 1, str(recipe), where)
    assert re.search(pattern, message), message


OFFSET = 1e-4


def train_drifting(recipe):
    """A rank whose actor_logprob gives the first half of the sequences log-probabilities that are OFFSET too low.

    Returns what it warned of.
    """
    forward = Trainer._forward

    def drifting(trainer, plan, batch, name):
        ran = forward(trainer, plan, batch, name)
        shifts = [OFFSET if sample < len(ran.results) // 2 else 0.0 for sample in range(len(ran.results))]
        return replace(ran, results=[logprobs - shift for logprobs, shift in zip(ran.results, shifts, strict=True)])

    with mock.patch.object(Trainer, "_forward", drifting), mock.patch.object(logger, "warning") as warned:
        train(load_recipe(recipe), Resume.NEVER)
    return [call.args[0] for call in warned.call_args_list]


def test_drift_before_the_first_update_is_measured_and_warned_about_once(folder):
    """Micro-batches of unlike sizes round alike in these tiny models, so the drift is put in, and its figures are known."""
    changes = {
        "algorithm__max_ratio_drift": OFFSET / 2,
        "phases__actor_logprob": {"micro_batch": {"sequences": 1}},
        "phases__actor_update": {"mini_batch": 8, "micro_batch": {"max_tokens": 160}},
    }
    recipe = replayed_recipe(folder, "drift", False, 2, 1, 2, STEPS, **changes)
    warnings = run_ranks(train_drifting, 2, str(recipe))
    for line in metrics_of(folder, "drift"):
        assert line["actor/ratio_drift_max"] == pytest.approx(math.expm1(OFFSET), rel=0.01)
        assert line["actor/ratio_drift_exceeded"] == 1
        assert OFFSET / 4 < line["actor/ratio_drift_mean"] < OFFSET, "a part of the first mini-batch has none"
    assert ["algorithm.max_ratio_drift" in warning for warning in sum(warnings, [])] == [True], "rank 0, once in two steps"


def test_an_overlong_completion_is_named_and_never_cut(tmp_path):
    tiny_run(tmp_path)
    replay = str(fake_rollouts(tmp_path, 1, longest=15))
    (message,) = run_ranks(refusal, 1, str(tiny_recipe(tmp_path, "long", False, 1, 1, 1, 1, rollout__replay=replay)))
    match = re.search(r"sample \d+ \(group \d+\) has a completion of (\d+) tokens, and rollout.max_new_tokens = 12", message)
    assert match and int(match[1]) > 12, message
