"""Packages that only some settings need, and whether the hub of models and data can be reached."""

import importlib.util
import urllib.error
import urllib.request

from huggingface_hub import constants


def require(package: str, who: str, install: str = "") -> None:
    """Raise ValueError with what to install, unless the package is there."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{who} needs: pip install {install or package}")


def silence_of_hub() -> str:
    """Why the hub does not answer, within 5 s; empty if it does. The libraries would try for half a
    minute, and say so in a dozen lines."""
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=5):
            return ""
    except urllib.error.HTTPError:
        return ""  # it answers
    except OSError as error:
        return str(error)
