"""What a run folder names beside itself - data, a model, a server - is used only when the user says the same.

A folder may come from anybody: obeyed, its call could read any file here and send it to any address.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.spec import ScoreCall

_NAMED = ("data", "model", "workers", "engine", "key_env")
"""What a call names that is not inside of the run folder."""


def require_stated(run: Path, call: ScoreCall, given: Mapping[str, Any], *, command: str) -> None:
    """Refuse to carry out the call of a run folder unless `given` names the same data and model, and the same workers.

    Nothing has been read, started or sent until then. `command` is what to write again.
    """
    usual = ScoreCall(model="")
    known = {name: getattr(call, name, "") for name in _NAMED}
    needed = {
        name: value for name, value in known.items() if name in ("data", "model") or value != getattr(usual, name, "")
    }
    said = {name: value for name, value in given.items() if value}
    other = [name for name in {**needed, **said} if not _is_same(known[name], said.get(name))]
    if not other:
        return
    options = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in needed.items())
    silent = [name for name in other if name not in said]
    raise ConfigError(
        f"what the folder {run} names is not used unless you say the same: {', '.join(silent or other)}",
        seen="; ".join(
            f"{name}: {known[name]} in the folder, {said.get(name) or 'nothing'} from you" for name in other
        ),
        do=f"if these are yours, write: {command} {options}",
    )


def _is_same(known: Any, given: Any) -> bool:
    if given is None or not isinstance(known, str):
        return bool(known == given)
    return known == given or _whole(known) == _whole(str(given))


def _whole(place: str) -> str:
    """A path made absolute, with links resolved; an address unchanged."""
    return place if "://" in place else str(Path(place).resolve())
