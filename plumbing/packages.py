"""Packages that only some settings need."""

import importlib.util


def require(package: str, who: str, install: str = "") -> None:
    """Raise ValueError with what to install, unless the package is there."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{who} needs: pip install {install or package}")
