"""Defines the exceptions. Each has a `code` (the stable name that prefixctl and the C API use, too)
and a sentence that says what to do."""

from __future__ import annotations


class PrefixdError(Exception):
    code = "internal"
    #: When the same call is worth trying again (ResourceExhausted, where memory was short for a
    #: while), in milliseconds. 0: something else must change first.
    retry_after_ms = 0


class InvalidArgument(PrefixdError, ValueError):
    """The request itself is wrong; the same call fails again."""

    code = "invalid_argument"


class NotFound(PrefixdError, LookupError):
    """There is no such model, prefix, session or file."""

    code = "not_found"


class AlreadyExists(PrefixdError):
    """The name exists already, with other contents."""

    code = "already_exists"


class FailedPrecondition(PrefixdError):
    """The order or state is wrong: a locked store, a detached session."""

    code = "failed_precondition"


class Infeasible(PrefixdError):
    """The read budget cannot pay for anchors and estimator."""

    code = "infeasible"


class ResourceExhausted(PrefixdError):
    """The disk is full, a quota is reached, or there are too many sessions."""

    code = "resource_exhausted"


class Corrupt(PrefixdError):
    """Stored bytes do not verify; they were not returned."""

    code = "corrupt"


class Unavailable(PrefixdError, ConnectionError):
    """The daemon or tier is not reachable now; trying again may work."""

    code = "unavailable"


class IoError(PrefixdError, OSError):
    """The operating system refused a read or write."""

    code = "io"


class Cancelled(PrefixdError):
    """The caller or a shutdown ended the call."""

    code = "cancelled"


class DeadlineExceeded(PrefixdError, TimeoutError):
    """There was no answer within the time that the caller gave."""

    code = "deadline_exceeded"


class Internal(PrefixdError):
    """An invariant is broken, which is a bug in prefixd."""

    code = "internal"


_BY_CODE = {cls.code: cls for cls in PrefixdError.__subclasses__()}


def make(code: str, message: str, retry_after_ms: int = 0) -> PrefixdError:
    """Returns the exception for a code; the extension module calls this."""
    error = _BY_CODE.get(code, Internal)(message)
    error.retry_after_ms = retry_after_ms
    return error
