"""Components of others: Python files that a user names, and installed packages that offer some.

Files are named in the environment, so that the processes and machines a study runs on load the same
ones. A package offers components by entry points of the groups `gradleak.attacks`,
`gradleak.defenses` and so on: each names a module, or a class in one, that registers them.
"""

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from gradleak.core.errors import GradleakError, near_paths
from gradleak.core.registry import KINDS

VARIABLE = "GRADLEAK_PLUGINS"  # files, as PATH has folders
PREFIX = "gradleak_plugin_"  # of a file's module, by which other processes find its classes
GROUPS = tuple(f"gradleak.{kind}s" for kind in KINDS)
_sources: dict[str, str] = {}  # what was loaded, by file name or package, with its hash or version


def name_plugins(paths: Iterable[str | Path]) -> None:
    """Adds files to those that this process and all it starts load, and loads them."""
    known = os.environ.get(VARIABLE, "").split(os.pathsep)
    more = [str(_find(path)) for path in paths]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*filter(None, known), *more]))
    load_plugins()


def has_plugins() -> bool:
    """Returns whether anything beside our own components may be there, without loading it."""
    return bool(os.environ.get(VARIABLE)) or bool(_list_points())


def load_plugins() -> None:
    """Loads every file and package that is named and was not loaded before."""
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        known = sys.modules.get(PREFIX + _stem(Path(path)))
        if known is None:
            _load_file(_find(path))
        elif known.__file__ != str(_find(path)):
            raise GradleakError(
                f"{path} has the name of another plugin, {known.__file__}: rename one of them."
            )
    for point in _list_points():
        owner = point.dist.name if point.dist is not None else "unknown"
        if f"{owner} {point.value}" not in _sources:
            _load_point(point, owner)


def list_sources() -> dict[str, str]:
    """Returns what was loaded: files with the hash of their source, packages with their version."""
    return dict(_sources)


@cache
def _list_points() -> tuple[EntryPoint, ...]:
    """What installed packages offer; to find it is a look into each of them."""
    return tuple(point for group in GROUPS for point in entry_points(group=group))


def _find(path: str | Path) -> Path:
    found = Path(path).expanduser().resolve()
    if not found.is_file():
        raise GradleakError(f"There is no plugin file {path}; {near_paths(str(path), 'check it.')}")
    if found.suffix != ".py":
        raise GradleakError(f"A plugin is a Python file, and {path} does not end in .py.")
    return found


def _stem(path: Path) -> str:
    return re.sub(r"\W", "_", path.stem)


def _load_file(path: Path) -> None:
    name, source = PREFIX + _stem(path), path.read_bytes()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file does wrong
        del sys.modules[name]
        raise GradleakError(
            f"The plugin {path} cannot be loaded: {_explain(error, path)}"
        ) from error
    _sources[path.name] = f"sha256:{hashlib.sha256(source).hexdigest()[:16]}"


def _load_point(point: EntryPoint, owner: str) -> None:
    try:
        point.load()
    except Exception as error:
        raise GradleakError(
            f"The package {owner} offers {point.value}, which cannot be loaded: {error}. Mend or"
            f" uninstall it."
        ) from error
    version = point.dist.version if point.dist is not None else "of no version"
    _sources[f"{owner} {point.value}"] = version


def _explain(error: Exception, path: Path) -> str:
    """Returns what went wrong, and in which line of the file."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    where = "" if line is None else f"line {line}, "
    return f"{where}{type(error).__name__}: {error}"
