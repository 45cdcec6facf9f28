"""Which task `--env` names: a built-in one, one of another package, or a class of your file."""

import importlib.util
import sys
from pathlib import Path

from envs import Env, EnvTask, Task
from plumbing.calls import attempt, said_by

# Name or prefix -> the module and class that has it; imported only when asked for.
BUILT_IN = {
    "addition": "tasks.puzzles:Addition",
    "max3": "tasks.puzzles:Max3",
    "countdown": "tasks.puzzles:Countdown",
    "grid": "tasks.games:Grid",
    "frozenlake": "tasks.games:FrozenLake",
    "guess": "tasks.games:Guess",
    "gsm8k": "tasks.math:MathTask",
    "math": "tasks.math:MathTask",
    "textworld": "tasks.adapters:TextWorld",
    "gem:": "tasks.adapters:Gem",
    "textarena:": "tasks.adapters:TextArena",
    "rg:": "tasks.adapters:ReasoningGym",
}


def make_task(config, seed: int = 0) -> Task:
    """Build the task that `config.env` names. Raises ValueError with one line if it cannot."""
    name, found = config.env, None
    for key, place in BUILT_IN.items():
        if name == key or (key.endswith(":") and name.startswith(key) and name != key):
            module, _, class_name = place.partition(":")
            found = getattr(importlib.import_module(module), class_name)
    found = found or load_class(name)
    if config.data and (name in ("addition", "max3") or issubclass(found, Env)):
        raise ValueError(f"--data {config.data}: env {name} makes its own rows")
    made: list[Task] = []
    kind = (EnvTask, found) if issubclass(found, Env) else (found,)
    attempt(lambda: made.append(kind[0](*kind[1:], config, seed)), f"env {name}", None)
    for part in ("train", "test"):
        rows = getattr(made[0], part, ())
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise ValueError(f"env {name}: its {part} rows are a {type(rows).__name__}, no list")
        if not len(rows):
            raise ValueError(f"env {name} has no {part} rows in {config.data or 'its class'}")
    return made[0]


def load_class(name: str) -> type[Task] | type[Env]:
    """Import the class of `path/file.py:Class`."""
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py") or not class_name:
        known = ", ".join(f"{k}NAME" if k[-1] == ":" else k for k in BUILT_IN)
        raise ValueError(f"unknown env {name!r}: one of {known}, or FILE.py:CLASS")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"env {name!r}: no such file: {path}")
    module_name = f"custom_env_{path.stem}"  # so that a file random.py takes no module's place
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is the user's file: whatever it raises, an exit too
        raise ValueError(f"env file {path}: {said_by(error)}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task | Env)):
        what = "no subclass of envs.Task or envs.Env" if found else "not in the file"
        raise ValueError(f"env {name!r}: {class_name} is {what}")
    return found
