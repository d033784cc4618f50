"""Shared by all tests: quiet libraries, one thread each (the machine's cores go to the ranks)."""

import os
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor

import hypothesis
import pytest

# No test asserts a time: an example may be slow on a machine that is busy, and so may be what makes it.
hypothesis.settings.register_profile("megarl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megarl")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_AUTH_MODE", "token")  # as in every process of a run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped is a failure, as in .ci/run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skips: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def engine_process() -> Iterator[ProcessPoolExecutor]:
    """A process that imports vLLM at the first call, once for all tests; each call has a fork of it for itself."""
    from tests.in_process_engine import EngineProcess

    with EngineProcess() as process:
        yield process
