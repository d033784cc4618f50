"""A folder with a tiny model, its prompts, and dumped rollouts, for the runs of a module."""

from pathlib import Path

import pytest

from tests.runs import fake_rollouts, tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    tiny_run(folder)
    fake_rollouts(folder, 4)
    return folder
