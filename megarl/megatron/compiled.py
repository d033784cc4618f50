"""A function compiled with torch.compile that never stops a run: its first call has a deadline, and it falls back."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.platform import current as platform
from megarl.telemetry.clock import span

logger = logging.getLogger(__name__)
Function = Callable[..., Tensor]


class Compiled:
    """`function`, compiled; or as it is, for the rest of the run, where its first call fails or takes too long.

    To be called without gradients, with tensors and numbers. `timeout_s` is the deadline of the first call, in which
    torch.compile compiles for sizes of any value. A later call never compiles: what the compiled code does not fit, runs as
    it is. `compile` is replaced in tests.
    """

    def __init__(self, function: Function, timeout_s: float, compile: Callable[[Function], Function] | None = None) -> None:
        self.function, self.timeout_s = function, timeout_s
        self._compile = compile if compile is not None else partial(torch.compile, dynamic=True)
        self._compiled: Function | None = None
        self.is_plain = False

    def __call__(self, *arguments: Any) -> Tensor:
        # A size of 1 is a constant to torch.compile: code compiled for it would serve nothing else.
        if self.is_plain or any(1 in part.shape for part in arguments if isinstance(part, Tensor)):
            return self.function(*arguments)
        if self._compiled is None:
            return self._first(arguments)
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._compiled(*arguments)

    def _first(self, arguments: tuple[Any, ...]) -> Tensor:
        # Copies: a thread past its deadline goes on, and the function may overwrite what it is given.
        copies = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
        device = next(part.device for part in copies if isinstance(part, Tensor))
        found: list[tuple[Function, Tensor]] = []
        failures: list[Exception] = []

        def call() -> None:
            try:
                platform.set_thread_device(device)
                # A new thread starts with gradients on, and code compiled for that does not fit calls without.
                with torch.no_grad():
                    compiled = self._compile(self.function)
                    found.append((compiled, compiled(*copies)))
            except Exception as failure:  # whatever the compiler raises: the plain function does the same
                failures.append(failure)

        # A daemon, so that a compiler that hangs does not keep the process alive. It cannot be stopped.
        thread = threading.Thread(target=call, name=f"compile {self.function.__name__}", daemon=True)
        thread.start()
        # A span, so that the watchdog knows it, too: a compiler that keeps Python's lock keeps this join from its end.
        with span(f"compile_{self.function.__name__}"):
            thread.join(self.timeout_s)
        if found:
            self._compiled, result = found[0]
            return result
        self.is_plain = True
        if failures:
            happened = f"failed: {type(failures[0]).__name__}: {failures[0]}"
        else:
            happened = (
                f"was not done after trainer.compile_timeout_s = {self.timeout_s:g} s; it stands in {_stands_in(thread)}"
            )
        logger.warning(
            "rank %d: trainer.compile = true, but the first call of the compiled %s %s; "
            "the plain function, which gives the same, is used for the rest of the run",
            dist.get_rank() if dist.is_initialized() else 0, self.function.__name__, happened,
        )  # fmt: skip
        return self.function(*arguments)


def _stands_in(thread: threading.Thread) -> str:
    """The innermost call of another thread, in words."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (
        "nothing: it has just ended"
        if frame is None
        else f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    )
