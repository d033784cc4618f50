"""`model`: where a model is on this machine, its shape, and whether its files are complete."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.models import ModelShape
from megarl.models.model_files import check_has_tokenizer
from megarl.models.stored_weights import check_tokenizer, check_weights, has_weights, read_vocabulary
from megarl.recipe.section import FilePath, Section
from megarl.recipe.violation import Violation, Violations

if TYPE_CHECKING:
    from megarl.recipe.recipe import Recipe


class ModelSection(Section):
    path: FilePath
    """Hugging Face directory or hub name the actor, the reference and the rollout engines start from."""


HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


Fetch = Callable[[str], Path]


# What `megarl check` reads of a model on the hub, which is little: sizes, and the tokenizer.
CONFIG_FILES = ["config.json", "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "*.jinja"]


class ModelNotFound(ValueError):
    """A model is neither a directory nor in the hub cache; `way_out` says what to do."""

    def __init__(self, path: str, way_out: str, reason: str = "") -> None:
        self.way_out = way_out
        super().__init__(f"not found: {path!r} is no directory with a config.json and not in the hub cache{reason}")


def find_model(path: str, fetch: Fetch | None = None) -> Path:
    """The directory of a model given as a directory (from the working directory) or as a hub name.

    A hub name is looked up in the local cache; `fetch`, which raises ValueError, gets what is not there.
    Raises ModelNotFound.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if not HUB_NAME.match(path) or Path(path).is_dir():
        raise ModelNotFound(path, _way_out(path))
    from huggingface_hub import try_to_load_from_cache  # here, because most recipes name a directory

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    if fetch is None or Path(path).parent.is_dir():
        raise ModelNotFound(path, _way_out(path))
    try:
        return fetch(path)
    except ValueError as error:
        reason = f", and fetching it failed: {' '.join(str(error).split())[:200]}"
        raise ModelNotFound(path, _way_out(path), reason) from error


def fetch_config(path: str) -> Path:
    """The directory in the hub cache with the CONFIG_FILES of a hub name, fetched where they are not there. Raises
    ValueError where the hub does not give them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(path, allow_patterns=CONFIG_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(str(error)) from error
    if not (directory / "config.json").is_file():
        raise ValueError("it has no config.json there")
    return directory


def missing_files(key: str, path: str) -> str | None:
    """One line that names the files of the model under `key` that are missing here, so that no rule checked them; None
    for a complete directory. Raises ModelNotFound."""
    directory = find_model(path)
    missing = [] if Path(path).is_dir() and has_weights(directory) else ["weights"]
    missing += [] if (directory / "tokenizer.json").is_file() else ["tokenizer"]
    return f"not checked: {' and '.join(missing)} of {key} = {path}" if missing else None


def model_shape(path: str, fetch: Fetch | None = None) -> ModelShape:
    """The shape of a model. Raises ModelNotFound, and ValueError for a config.json that megarl cannot run."""
    file = find_model(path, fetch) / "config.json"
    try:
        return ModelShape.from_directory(file.parent)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is no config.json of a decoder: {type(error).__name__} {error}") from error


def _way_out(path: str) -> str:
    parts = Path(path).parts
    if parts and parts[0] == "models" and "SmolLM2" in parts[-1]:
        return "run 'make quickstart', which prepares models/SmolLM2-135M-Instruct"
    folder = Path(path).parent
    siblings = sorted(str(config.parent) for config in folder.glob("*/config.json")) if folder.is_dir() else []
    close = difflib.get_close_matches(path, siblings, 1, 0.5)
    if close:
        return close[0]
    if HUB_NAME.match(path) and not folder.is_dir():
        return f"'hf download {path} config.json' where there is a network; 'megarl train' fetches the weights"
    return "a directory with a Hugging Face config.json, or a hub name like Qwen/Qwen3-0.6B"


def files_fit_model(key: str, path: str, shape: ModelShape, fetch: Fetch | None) -> Violations:
    """Weights and tokenizer on disk are the model's.

    A directory without weights can still be checked and planned for, and the cache may lack files of a hub name; the start
    of a run asks for all.
    """
    directory = find_model(path, fetch)
    try:
        if Path(path).is_dir() and has_weights(directory):
            scores = key == "reward_model.path"
            check_weights(directory, shape, critic=scores or key == "critic.path", score=scores)
            if key == "model.path":
                check_has_tokenizer(directory)
        check_tokenizer(directory, shape)
    except (ValueError, OSError) as error:
        yield Violation(key, path, f"cannot be loaded: {error}", "the complete directory that save_pretrained wrote")


def same_tokens(recipe: Recipe, key: str, path: str, fetch: Fetch | None) -> Violations:
    """A tokenizer of a role that gives the actor's tokens other numbers."""
    try:
        numbers, actor_numbers = (read_vocabulary(find_model(model, fetch)).tokens for model in (path, recipe.model.path))
        num_tokens = model_shape(recipe.model.path, fetch).vocab
    except (ModelNotFound, ValueError, OSError):
        return  # another rule reports it
    # A token without an embedding in the actor is in no prompt and no completion.
    known = [token for token, number in actor_numbers.items() if number < num_tokens]
    different = [token for token in known if numbers and numbers.get(token) != actor_numbers[token]]
    if different:
        token = different[0]
        rule = (
            f"its tokenizer gives {token!r} the number {numbers.get(token)}, that of model.path gives it "
            f"{actor_numbers[token]}; {len(different)} of {len(actor_numbers)} tokens differ"
        )
        yield Violation(key, path, rule, "a model with the tokenizer of model.path")


def positions_fit_model(recipe: Recipe, shape: ModelShape, role: str) -> Violations:
    """Sequences that are longer than the positions of the model under `role`."""
    longest, prompt = recipe.max_sequence_tokens, recipe.data.max_prompt_tokens
    if longest <= shape.max_positions:
        return
    whose = "" if role == "model" else f"{role}'s "
    room = shape.max_positions - prompt
    nearest = str(room) if room > 0 else "a smaller data.max_prompt_tokens first"
    if recipe.run.is_supervised:
        rule = f"the {whose}model has {shape.max_positions} positions"
        yield Violation("data.max_tokens", recipe.data.max_tokens, rule, str(shape.max_positions))
        return
    made_of = f"{recipe.completion_key} = {recipe.max_completion_tokens} with data.max_prompt_tokens {prompt}"
    rule = f"{made_of} makes {longest} tokens, the {whose}model has {shape.max_positions} positions"
    key = "rollout.max_new_tokens" if recipe.environment is None else "environment.max_episode_tokens"
    section = recipe.rollout if recipe.environment is None else recipe.environment
    if recipe.environment is not None and 0 < room < recipe.rollout.max_new_tokens:  # an episode has room for one turn
        nearest = f"{room}, with rollout.max_new_tokens: {room}"
    yield Violation(key, getattr(section, key.partition(".")[2]), rule, nearest)
