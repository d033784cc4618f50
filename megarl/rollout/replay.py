"""Rollouts read from files in place of engines: for tests across layouts and for debugging one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.data.sample import Completion, Prompt, Sample
from megarl.rollout.batch import EpisodeFacts, RolloutBatch, RolloutExecuted, dump_file, greedy_folder
from megarl.rollout.requests import EngineReport


@dataclass(frozen=True)
class FilePayload:
    """Samples of a dumped step; every rank reads the file itself."""

    file: str

    def fetch(self, sample_ids: Iterable[int]) -> dict[int, Sample]:
        with np.load(self.file) as dump:
            columns = {name: dump[name] for name in dump.files}
        prompt_ends = np.cumsum(columns["prompt_lengths"])
        ends = np.cumsum(columns["completion_lengths"])
        routing = columns.get("routing")
        routed_ends = ends + prompt_ends - np.arange(1, len(ends) + 1)  # the last token of a sequence chose no experts
        samples = {}
        for s in sample_ids:
            part = slice(int(ends[s] - columns["completion_lengths"][s]), int(ends[s]))
            prompt = slice(int(prompt_ends[s] - columns["prompt_lengths"][s]), int(prompt_ends[s]))
            num_routed = int(columns["prompt_lengths"][s] + columns["completion_lengths"][s]) - 1
            routed = slice(int(routed_ends[s]) - num_routed, int(routed_ends[s]))
            completion = Completion(
                token_ids=columns["token_ids"][part],
                logprobs=columns["logprobs"][part],
                finish_reason=str(columns["finish_reasons"][s]),
                first_version=int(columns["first_version"][s]),
                last_version=int(columns["last_version"][s]),
                routing=None if routing is None else routing[routed],
                own=columns["own"][part] if "own" in columns else None,  # type: ignore[arg-type]
            )
            samples[s] = Sample(int(columns["groups"][s]), columns["prompt_ids"][prompt], completion)
        return samples


class ReplayPool:
    """Answers as `EnginePool` does, from files that `dump_rollout` wrote; weights are not looked at.

    With `routed` the dumps must hold the experts that the rollout chose, with `greedy` a greedy completion of each prompt,
    and with `played` what became of episodes.
    """

    address: str | None = None

    def __init__(
        self,
        directory: str,
        group_size: int,
        max_concurrent: int,
        routed: bool = False,
        greedy: bool = False,
        played: bool = False,
    ) -> None:
        self._directory = Path(directory).absolute()
        self._group_size, self._max_concurrent, self._routed = group_size, max_concurrent, routed
        self._played = played
        # Groups of one.
        self._greedy = ReplayPool(str(greedy_folder(directory)), 1, max_concurrent, played=played) if greedy else None

    def start(self) -> None:
        """Raises ValueError for a directory without dumps, or with dumps that lack the experts' choice."""
        if self._greedy is not None:
            self._greedy.start()
        files = sorted(self._directory.glob("step-*.npz"))
        if not files:
            raise ValueError(
                f"rollout.replay = {str(self._directory)!r} holds no step-*.npz; "
                "a run with run.dump_rollouts = true writes them"
            )
        with np.load(files[0]) as dump:
            self._check_columns(files[0], dump.files)

    def generate(
        self, prompts: Sequence[Prompt], step: int, resync: Callable[[Sequence[int]], None] | None = None
    ) -> RolloutBatch:
        """The dumped rollouts of a step; no engine can die. Raises ValueError where they are not of these prompts."""
        file = dump_file(self._directory, step)
        if not file.is_file():
            raise ValueError(f"rollout.replay = {str(self._directory)!r} has no {file.name}; it ends before step {step}")
        with np.load(file) as dump:
            columns = {name: dump[name] for name in dump.files}
        self._check(file, columns, prompts)
        return RolloutBatch(
            payload=FilePayload(str(file)),
            groups=columns["groups"],
            prompt_lengths=columns["prompt_lengths"],
            completion_lengths=columns["completion_lengths"],
            finish_reasons=[str(reason) for reason in columns["finish_reasons"]],
            first_version=columns["first_version"],
            last_version=columns["last_version"],
            executed=RolloutExecuted(len(prompts), self._group_size, self._max_concurrent),
            greedy=None if self._greedy is None else self._greedy.generate(prompts, step),
            own_lengths=columns.get("own_lengths"),  # type: ignore[arg-type]
            episodes=_episodes(columns) if self._played else None,
        )

    def rest(self) -> None:
        """No engine to rest."""

    def take_times(self) -> list[EngineReport]:
        """No engine did anything."""
        return []

    def shutdown(self) -> None:
        pass

    def _check_columns(self, file: Path, names: Iterable[str]) -> None:
        if self._played != ("episode_rewards" in names):
            found, other = ("no episodes", "with an") if self._played else ("episodes", "without an")
            raise ValueError(f"{file} has {found}; replay dumps of a run {other} environment, as this recipe is")
        if self._routed and "routing" not in names:
            raise ValueError(
                f"{file} does not say which experts the rollout chose, and actor.router_replay = true reuses them; "
                "replay dumps of a run with actor.router_replay = true, or set it to false"
            )

    def _check(self, file: Path, columns: dict[str, np.ndarray], prompts: Sequence[Prompt]) -> None:
        self._check_columns(file, columns)
        size = int(columns["group_size"])
        if size != self._group_size or len(columns["groups"]) != size * len(prompts):
            raise ValueError(
                f"{file}: {len(columns['groups'])} samples in groups of {size}; the recipe asks for "
                f"{len(prompts)} groups of {self._group_size} (phases.rollout.prompts, algorithm.group_size)"
            )
        starts = np.cumsum(columns["prompt_lengths"]) - columns["prompt_lengths"]
        # Environments may have given other prompts than the data.
        for position, prompt in enumerate(() if self._played else prompts):
            s = position * size
            start = int(starts[s])
            dumped = columns["prompt_ids"][start : start + int(columns["prompt_lengths"][s])]
            if not np.array_equal(dumped, prompt.token_ids):
                raise ValueError(
                    f"{file}: prompt {position} is not the one the recipe gives in this step; "
                    "replay with the data section and the seed that the dump was made with"
                )


def _episodes(columns: dict[str, np.ndarray]) -> EpisodeFacts:
    prefix = "episode_"
    return EpisodeFacts(**{name.removeprefix(prefix): columns[name] for name in columns if name.startswith(prefix)})
