"""Rollouts in files: a step's batch is dumped, and read back in place of engines, for tests across layouts and for debugging
one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megarl.data.prompts import PromptStream
from megarl.data.routing import teachers_of
from megarl.data.sample import Prompt, Sample
from megarl.recipe.recipe import Recipe
from megarl.reward.workers import RewardWorkers, add_episodes
from megarl.rollout.groups import COLUMNS, EpisodeFacts, GroupResult, RolloutBatch, RolloutExecuted, joined_arrays
from megarl.rollout.taken import KnownBatches, Resync, Taken

EPISODE = "episode_"  # before the name of an `EpisodeFacts` column


def dump_file(directory: str | Path, step: int) -> Path:
    """Return the file of a step's rollouts."""
    return Path(directory) / f"step-{step:06d}.npz"


def greedy_folder(directory: str | Path) -> Path:
    """Return the folder of the greedy completions of dumped rollouts, in files of the same names."""
    return Path(directory) / "greedy"


def dump_rollout(directory: str | Path, step: int, batch: RolloutBatch) -> Path:
    """Write one step's rollouts for `read_rollout`, atomically; return the file."""
    if batch.greedy is not None:
        dump_rollout(greedy_folder(directory), step, batch.greedy)
    samples = batch.payload.fetch(range(len(batch)))
    ordered = [samples[s] for s in range(len(batch))]
    file = dump_file(directory, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    arrays = joined_arrays([sample.completion for sample in ordered])
    episodes = {} if batch.episodes is None else vars(batch.episodes)
    with partial.open("wb") as stream:
        np.savez(
            stream,
            group_size=np.int64(batch.executed.group_size),
            finish_reasons=np.array(batch.finish_reasons),
            prompt_ids=np.concatenate([sample.prompt_ids for sample in ordered]),
            **{name: array for name, array in arrays.items() if array is not None},
            **{name: getattr(batch, name) for name in COLUMNS},
            **{EPISODE + name: column for name, column in episodes.items()},
        )
    partial.rename(file)
    return file


@dataclass(frozen=True)
class FilePayload:
    """Samples of a dumped step; every rank reads the file itself."""

    file: str

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        with np.load(self.file) as dump:
            columns = {name: dump[name] for name in dump.files}
        step = GroupResult(
            group=0,  # of all groups
            lengths=columns["completion_lengths"],
            finish_reasons=tuple(columns["finish_reasons"].tolist()),
            routing=columns.get("routing"),
            prefixes=np.arange(len(columns["groups"])),  # a file has the prompt of each sequence
            **{name: columns[name] for name in ("prompt_ids", "prompt_lengths", "token_ids", "logprobs", "versions", "own")},
        )
        return {s: replace(step.sample(s), group=int(columns["groups"][s])) for s in sample_ids}


def check_dumps(recipe: Recipe) -> None:
    """Raise ValueError for a `rollout.replay` without dumps, or with dumps that lack what the recipe needs: the recorded
    experts, the facts of episodes, or the greedy completion of each prompt."""
    for directory, greedy in _directories(recipe):
        files = sorted(directory.glob("step-*.npz"))
        if not files:
            raise ValueError(
                f"rollout.replay = {str(directory)!r} holds no step-*.npz; a run with run.dump_rollouts = true writes them"
            )
        with np.load(files[0]) as dump:
            _check_columns(recipe, greedy, files[0], dump.files)


def read_rollout(recipe: Recipe, prompts: Sequence[Prompt], step: int) -> RolloutBatch:
    """Return the dumped rollouts of a step; weights are not looked at. Raises ValueError if a file is missing or has other
    prompts."""
    max_concurrent, played = recipe.phases.rollout.max_concurrent, recipe.environment is not None
    assert max_concurrent is not None, "loading a recipe with a replay sets it"
    batches = []
    for directory, greedy in _directories(recipe):
        file, size = dump_file(directory, step), 1 if greedy else recipe.algorithm.group_size
        if not file.is_file():
            raise ValueError(f"rollout.replay = {str(directory)!r} has no {file.name}; it ends before step {step}")
        with np.load(file) as dump:
            columns = {name: dump[name] for name in dump.files}
        _check_columns(recipe, greedy, file, columns)
        _check_prompts(file, columns, prompts, size, played)
        episodes = {name.removeprefix(EPISODE): columns[name] for name in columns if name.startswith(EPISODE)}
        batch = RolloutBatch(
            payload=FilePayload(str(file)),
            finish_reasons=[str(reason) for reason in columns["finish_reasons"]],
            executed=RolloutExecuted(len(prompts), size, max_concurrent),
            episodes=EpisodeFacts(**episodes) if played else None,
            **{name: columns[name] for name in COLUMNS},
        )
        batches.append(batch)
    return replace(batches[0], greedy=batches[1]) if len(batches) > 1 else batches[0]


def _directories(recipe: Recipe) -> list[tuple[Path, bool]]:
    """Return the folders of a recipe's dumps, and whether each has greedy completions."""
    assert recipe.rollout.replay is not None
    directory = Path(recipe.rollout.replay).absolute()
    greedy = [(greedy_folder(directory), True)] if recipe.algorithm.advantage == "remax" else []
    return [(directory, False), *greedy]


def _check_columns(recipe: Recipe, greedy: bool, file: Path, names: Iterable[str]) -> None:
    played = recipe.environment is not None
    if played != ("episode_rewards" in names):
        content, other = ("no episodes", "with an") if played else ("episodes", "without an")
        raise ValueError(f"{file} has {content}; replay dumps of a run {other} environment, as this recipe is")
    if recipe.actor.router_replay and not greedy and "routing" not in names:
        raise ValueError(
            f"{file} does not say which experts the rollout chose, and actor.router_replay = true reuses them; "
            "replay dumps of a run with actor.router_replay = true, or set it to false"
        )


def _check_prompts(file: Path, columns: dict[str, np.ndarray], prompts: Sequence[Prompt], size: int, played: bool) -> None:
    dumped_size, num_rollouts = int(columns["group_size"]), int(columns["rollouts"][-1]) + 1
    if dumped_size != size or num_rollouts != size * len(prompts):
        raise ValueError(
            f"{file}: {num_rollouts} rollouts in groups of {dumped_size}; the recipe asks for "
            f"{len(prompts)} groups of {size} (phases.rollout.prompts, algorithm.group_size)"
        )
    if played:
        return  # environments may have given other prompts than the data
    starts = np.cumsum(columns["prompt_lengths"]) - columns["prompt_lengths"]
    for position, prompt in enumerate(prompts):
        first = int(np.searchsorted(columns["rollouts"], position * size))
        start, length = int(starts[first]), int(columns["prompt_lengths"][first])
        if not np.array_equal(columns["prompt_ids"][start : start + length], prompt.token_ids):
            raise ValueError(
                f"{file}: prompt {position} is not the prompt of this step by the recipe; "
                "replay with the data section and the seed that the dump was made with"
            )


class ReplayStream(KnownBatches):
    """Answers as `RolloutStream` does, from dumped rollouts."""

    def __init__(self, recipe: Recipe, prompts: PromptStream, rewards: RewardWorkers) -> None:
        super().__init__(recipe, prompts)
        self._rewards = rewards
        self._step = 0
        self._batch: tuple[list[Prompt], RolloutBatch] | None = None

    def begin(self, step: int) -> None:
        """Choose the rollouts of a step."""
        self._step = step

    def wait_sampled(self, resync: Resync) -> None:
        """Read them. Raises ValueError if they are missing or have other prompts."""
        prompts = self._prompts.take(self._recipe.phases.rollout.prompts)
        self._batch = prompts, read_rollout(self._recipe, prompts, self._step)

    def take(self) -> Taken:
        """Score them."""
        assert self._batch is not None, "wait_sampled comes first"
        prompts, rollouts = self._batch
        batches = [rollouts] if rollouts.greedy is None else [rollouts, rollouts.greedy]
        parts = [(batch.payload, batch.last_segments.tolist(), batch.executed.group_size) for batch in batches]
        scored = self._rewards.score_together(parts, prompts)
        rewards, *others = map(add_episodes, scored, [batch.episodes for batch in batches])
        greedy = others[0] if others else None
        self._prompts.learn(prompts, rewards.rewards, rewards.valid)
        return Taken(rollouts, rewards, greedy, {}, teachers_of(self._recipe, prompts))
