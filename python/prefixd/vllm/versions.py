"""Knows the versions of vLLM that the connector was run with. Its interface for connectors is declared
experimental and changes between releases, so others are refused instead of tried."""

from __future__ import annotations

from vllm.version import __version__ as installed

from prefixd.errors import FailedPrecondition

TRIED = ("0.32.0",)


def check(version: str = installed) -> None:
    """Raises FailedPrecondition for a version that is not in the table."""
    release = version.split("+")[0]
    if release not in TRIED:
        raise FailedPrecondition(
            f"prefixd.vllm was run with vLLM {', '.join(TRIED)}, and this is {version}: install one of those, or "
            "run its tests with yours (make test-vllm) and add it to TRIED in prefixd/vllm/versions.py"
        )
