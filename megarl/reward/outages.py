"""Tell whether a user's function failed because a service that it asks was not reached or could not judge."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Any

# Classes of errors for a service that was not reached, by library: only the user's function needs to have them.
UNREACHED = {
    "builtins.ConnectionError", "builtins.TimeoutError", "socket.gaierror", "ssl.SSLError", "httpx.TransportError",
    "requests.ConnectionError", "requests.Timeout", "aiohttp.ClientConnectionError", "openai.APIConnectionError",
    "anthropic.APIConnectionError",
}  # fmt: skip
STATUS_FIELDS = ("status_code", "status")  # where errors hold an HTTP status, if not in their response
NO_ROUTE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)


def is_outage(error: BaseException | None, endpoint: str | None = None) -> bool:
    """Return whether an error, or one that caused it, says that a service was not reached or cannot judge now (status 429 or
    5xx). An error that a completion can cause is no outage: a missing file, an invalid URL, a program that closes its pipe,
    or an answer of `endpoint`, as to a request for a turn too many."""
    is_busy, seen = False, list[BaseException]()
    while error is not None and error not in seen:
        if _is_unreached(error):
            return True
        response: Any = getattr(error, "response", None)
        with suppress(AttributeError, RuntimeError):  # httpx raises the latter for a response without a request
            if endpoint is not None and str(response.request.url).startswith(endpoint):
                return False
        for status in (getattr(response, "status_code", None), *(getattr(error, key, None) for key in STATUS_FIELDS)):
            is_busy |= isinstance(status, int) and (status == 429 or status >= 500)
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return is_busy


def _is_unreached(error: BaseException) -> bool:
    reason = getattr(error, "reason", None)  # of urllib
    if isinstance(reason, BaseException) and _is_unreached(reason):
        return True
    if isinstance(error, OSError) and error.errno in NO_ROUTE:
        return True
    classes = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    return not UNREACHED.isdisjoint(classes) and not isinstance(error, BrokenPipeError)
