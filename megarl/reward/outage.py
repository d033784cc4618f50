"""Tell an outage of a service that a user's function asks from an error that a completion can cause."""

from __future__ import annotations

import errno
import socket

# Libraries that ask services, by name, since only the user's function needs to have them.
LIBRARIES = {"httpx", "requests", "urllib", "aiohttp", "openai", "anthropic"}
# Where their errors hold an HTTP status.
STATUS_FIELDS = ("status_code", "status", "code")
# Their errors for a service that was not reached, by library and class.
UNREACHED = {
    ("httpx", "TransportError"), ("requests", "ConnectionError"), ("requests", "Timeout"),
    ("aiohttp", "ClientConnectionError"), ("openai", "APIConnectionError"), ("anthropic", "APIConnectionError"),
}  # fmt: skip
NO_ROUTE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)


def is_outage(error: BaseException | None) -> bool:
    """Whether a service was not reached, or answered that it cannot judge now (status 429 or 5xx). True as well of an error
    that was raised because of such an error. An error that a completion can cause is no outage: a missing file, a URL that
    is no URL, a program that closes its pipe."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if _is_of_transport(error):
            return True
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_of_transport(error: BaseException) -> bool:
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    if LIBRARIES.intersection(library for library, _ in bases):
        statuses = (
            getattr(getattr(error, "response", None), "status_code", None),
            *(getattr(error, field, None) for field in STATUS_FIELDS),
        )
        if status := next((status for status in statuses if isinstance(status, int)), 0):
            return status == 429 or status >= 500
    if ("urllib", "URLError") in bases:
        reason = getattr(error, "reason", None)
        return isinstance(reason, OSError) and reason.filename is None
    if isinstance(error, OSError) and error.errno in NO_ROUTE or bases & UNREACHED:
        return True
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) and not isinstance(error, BrokenPipeError)
