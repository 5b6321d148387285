"""What can go wrong, as exceptions. Each has a `code` (the stable name that prefixctl and the C API use
too) and a sentence that says what to do."""

from __future__ import annotations


class PrefixdError(Exception):
    code = "internal"


class InvalidArgument(PrefixdError, ValueError):
    """The request itself is wrong; the same call will fail again."""

    code = "invalid_argument"


class NotFound(PrefixdError, LookupError):
    """No such model, prefix, session or file."""

    code = "not_found"


class AlreadyExists(PrefixdError):
    """It is there already, with other contents."""

    code = "already_exists"


class FailedPrecondition(PrefixdError):
    """The order or state is wrong: a locked store, a detached session."""

    code = "failed_precondition"


class Infeasible(PrefixdError):
    """The read budget cannot pay for anchors and estimator."""

    code = "infeasible"


class ResourceExhausted(PrefixdError):
    """Disk full, quota, too many sessions."""

    code = "resource_exhausted"


class Corrupt(PrefixdError):
    """Stored bytes do not verify; they were not returned."""

    code = "corrupt"


class Unavailable(PrefixdError, ConnectionError):
    """Daemon or tier not reachable now; trying again may work."""

    code = "unavailable"


class IoError(PrefixdError, OSError):
    """The operating system refused a read or write."""

    code = "io"


class Cancelled(PrefixdError):
    """Aborted by the caller or by shutdown."""

    code = "cancelled"


class Internal(PrefixdError):
    """A broken invariant: a bug in prefixd."""

    code = "internal"


_BY_CODE = {cls.code: cls for cls in PrefixdError.__subclasses__()}


def make(code: str, message: str) -> PrefixdError:
    """The exception for a code; called by the extension module."""
    return _BY_CODE.get(code, Internal)(message)
