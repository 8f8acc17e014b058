"""A thing of the user's own code, named on the command line: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from truebatch.errors import ConfigError, TruebatchError
from truebatch.io.text_encoding import nearest


def is_target(text: str) -> bool:
    """Whether text names a target rather than a plain file: `something:name`."""
    place, colon, name = text.rpartition(":")
    return bool(colon and place) and all(part.isidentifier() for part in name.split("."))


def resolve_target(target: str) -> Any:
    """The object a target names; the user's code is imported, with the current folder importable.

    Every way this can fail raises `ConfigError`; if the user's own code raises, the line of theirs is shown.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        wide = "; '：' is the full-width colon, type ':'" if "：" in target else ""
        raise ConfigError(
            "a target is written package.module:name or file.py:name" + wide,
            seen=repr(target),
            do=f"add the name after a colon, for example {target.rstrip(':') or 'data.py'}:samples",
        )
    module = _load_file(Path(place), target) if place.endswith(".py") else _load_module(place, target)
    return _find(module, name, place)


def _load_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        folder = path.parent
        found = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
        raise ConfigError(
            f"there is no file {path}{nearest(path.name, found)}",
            seen=f"{target!r}; Python files there: {', '.join(found[:8]) or 'none'}",
            do="check the path, relative to the current folder",
        )
    # A name of its own, so that a user's `random.py` does not replace the library of that name.
    name = f"truebatch_target_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable(path.resolve().parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        _refuse_code(error, target)
    return module


def _load_module(name: str, target: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            "the part before the colon is neither a .py file nor a module name",
            seen=repr(target),
            do="write package.module:name or file.py:name",
        )
    try:
        with _importable(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            _refuse_code(error, target)
        raise ConfigError(
            f"there is no module {name!r}",
            seen=f"{target!r}: {error}",
            do="install it, run from the folder that holds it, or name the file: path/to/file.py:name",
        ) from error
    except BaseException as error:
        _refuse_code(error, target)


def _find(module: ModuleType, name: str, place: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(
                f"{place} has no {part!r}{nearest(part, names)}",
                seen=f"names there: {', '.join(sorted(names)[:12]) or 'none'}",
                do="name one of them after the colon",
            )
        found = getattr(found, part)
    return found


def call_target(target: str, function: Any) -> Any:
    """Call a function of the user without arguments; what it raises is shown with its own line."""
    try:
        return function()
    except BaseException as error:
        _refuse_code(error, target)


def _refuse_code(error: BaseException, target: str) -> NoReturn:
    if isinstance(error, (KeyboardInterrupt, TruebatchError)):
        raise error
    raise ConfigError(
        f"the code of {target} raised {type(error).__name__}: {str(error)[:200]}",
        seen=_own_line(error),
        do="correct that line; it is not part of truebatch",
    ) from error


def _own_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and Path(frame.filename) != Path(__file__)
    ]
    last = frames[-1] if frames else None
    return f"{last.filename}:{last.lineno}: {last.line}" if last else repr(error)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
