"""Reads what the user says in `kv_connector_extra_config`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from prefixd.errors import InvalidArgument

# What may be given for a default of each type.
_TYPES: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int), tuple: (tuple,)}
_TYPES[type(None)] = (dict,)


@dataclass(frozen=True)
class Options:
    prefixd: str  # a daemon's address ("unix:...", "tcp:...", "tls:..."), or a directory: a daemon is started there
    tenant: str = ""  # whose prompts; "" as the daemon says
    token: str = field(default="", repr=False)  # where the daemon requires one
    token_file: str = ""  # or the file in which it is, which neither vLLM's log nor its command line shows
    store: bool = True  # store prompts
    load: bool = True  # load stored ones
    min_tokens: int = 0  # load and store only from so many tokens on
    park_tokens: int = 0  # loads of so many tokens are parked, and others run meanwhile; 0: none
    match_seconds: float = 10.0  # a prompt is computed when it is not found within this time
    call_seconds: float = 10.0  # a call to the daemon that takes longer counts as failed
    commit_seconds: float = 60.0  # so does a commit, which takes as long as the disk does
    start_seconds: float = 60.0  # a daemon that is started may be silent for so long before it is ready
    load_mib: int = 128  # the buffers of all loads of a step together
    compute_when_faster: bool = True  # compute a stored prompt where loading it is estimated to take longer
    prefill_tokens_per_second: float = 0.0  # of this engine, for that estimate; 0: as its puts have shown
    weights: str = ""  # names the weights, instead of a digest of their files
    attach: bool = False  # attend over stored prefixes where they are, instead of loading them
    attach_tokens: int = 2048  # prefixes below are loaded
    own_window: int = 0  # own tokens of an attached request that keep blocks, when it generates; 0: all do
    own_memory_tokens: int = 4096  # of those that lost their blocks stay in the daemon's memory
    policy: Mapping[str, Any] | None = None  # of attached requests that have none (docs/policy.md)
    daemon: tuple[str, ...] = ()  # further arguments of a daemon that is started

    @property
    def directory(self) -> Path | None:
        if self.prefixd.startswith(("unix:", "tcp:", "tls:")):
            return None
        return Path(self.prefixd).expanduser().absolute()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        known = {one.name: one for one in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise InvalidArgument(
                f"kv_connector_extra_config has no '{unknown[0]}'; prefixd takes {', '.join(known)}"
            )
        if not given.get("prefixd"):
            raise InvalidArgument(
                "kv_connector_extra_config needs 'prefixd': the address of a daemon (unix:/path, tcp:host:port, "
                "tls:host:port), or a directory, in which one is started"
            )
        if not isinstance(given.get("daemon", ()), (list, tuple)):
            raise InvalidArgument(
                f"'daemon' of kv_connector_extra_config is a list of arguments, not {given['daemon']!r}"
            )
        values = {**given, "daemon": tuple(str(argument) for argument in given.get("daemon", ()))}
        for name, value in values.items():
            wanted = _TYPES[type(known[name].default)] if name != "prefixd" else (str,)
            if type(value) not in wanted or (isinstance(value, float) and not math.isfinite(value)):
                raise InvalidArgument(f"'{name}' of kv_connector_extra_config cannot be {value!r}")
        options = cls(**values)
        least = (
            options.min_tokens,
            options.park_tokens,
            options.match_seconds,
            options.attach_tokens,
            options.own_window,
            options.prefill_tokens_per_second,
        )
        above = (options.call_seconds, options.commit_seconds, options.start_seconds, options.load_mib)
        if options.own_memory_tokens < 256:
            raise InvalidArgument(f"own_memory_tokens is 256 or more, not {options.own_memory_tokens}")
        if min(least) < 0 or min(above) <= 0:
            raise InvalidArgument(
                "min_tokens, park_tokens, attach_tokens, own_window, match_seconds and prefill_tokens_per_second are 0 "
                "or more, call_seconds, commit_seconds, start_seconds and load_mib are above 0"
            )
        _agree(options, given)
        _check_directory(options)
        return replace(options, token=_read_token(options.token_file)) if options.token_file else options


def _check_directory(options: Options) -> None:
    """Refuses what was meant for an address."""
    if options.directory is None:
        return
    if re.fullmatch(r"[^/]+:\d+", options.prefixd):
        raise InvalidArgument(
            f"'prefixd' of kv_connector_extra_config is {options.prefixd!r}, which would be a directory: an address "
            f"begins with tcp: (tcp:{options.prefixd}), tls: or unix:"
        )
    if options.directory.exists() and not options.directory.is_dir():
        raise InvalidArgument(
            f"'prefixd' of kv_connector_extra_config, {options.prefixd}, is no directory; the socket of a daemon is "
            f"unix:{options.prefixd}"
        )


def _read_token(file: str) -> str:
    try:
        token = Path(file).expanduser().read_text().partition("\n")[0]
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"'token_file' of kv_connector_extra_config cannot be read: {error}") from error
    if not token:
        raise InvalidArgument(f"'token_file' of kv_connector_extra_config, {file}, is empty")
    return token


def _agree(options: Options, given: Mapping[str, Any]) -> None:
    """Refuses options that would have no effect beside the others."""
    if options.attach and not options.load:
        raise InvalidArgument('"attach" needs "load": what is not looked for cannot be attached')
    if options.token and options.token_file:
        raise InvalidArgument('"token" and "token_file" are two ways to give one token: give one of them')
    for name in ("daemon", "start_seconds"):
        if name in given and options.directory is None:
            raise InvalidArgument(
                f'"{name}" is of a daemon that the engine starts in a directory: {options.prefixd} is an address'
            )
    for name in ("attach_tokens", "own_window", "policy"):
        if name in given and not options.attach:
            raise InvalidArgument(f'"{name}" is of attached prefixes: it needs "attach": true')
    if "own_memory_tokens" in given and not options.own_window:
        raise InvalidArgument('"own_memory_tokens" is of tokens that lose their blocks: it needs "own_window"')


def check_role(role: str | None) -> None:
    """vLLM's roles split an engine in two, of which each would do the half of what the connector does."""
    if role != "kv_both":
        raise InvalidArgument(
            f'kv_role is {role!r}, and the connector knows "kv_both" alone; "store": false or "load": false in '
            "kv_connector_extra_config makes an engine that only loads or only stores"
        )
