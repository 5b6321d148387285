"""Names the packages that modules beyond the core need, before the first import of one fails."""

from __future__ import annotations

from importlib.util import find_spec


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def require(module: str, extra: str, *packages: str) -> None:
    """Raises ModuleNotFoundError with the command that helps, unless all packages are installed."""
    missing = [package for package in packages if not _is_there(package)]
    if missing:
        raise ModuleNotFoundError(
            f"{module} needs {', '.join(missing)}: pip install 'prefixd[{extra}]'", name=missing[0]
        )
