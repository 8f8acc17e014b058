"""`verify` for things named on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from truebatch.errors import ConfigError
from truebatch.import_target import call_target, is_target, resolve_target
from truebatch.training.system import System
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig
from truebatch.verification.engines.api import Against, load_target
from truebatch.verification.engines.report import AgainstReport
from truebatch.verification.report import VerifyReport


def ask(target: str, named: Mapping[str, str], config: VerifyConfig) -> VerifyReport:
    """Resolve a target and what goes with it, and verify it."""
    given = {name: _value(name, text) for name, text in named.items()}
    if not is_target(target) or Path(target).is_dir():
        hf = import_module("truebatch.hf.load")
        return _ask_about(hf.load_model(target), given, config)
    found = _found(target, given)
    if isinstance(found, Mapping | tuple):
        report: VerifyReport = _with_arguments(found, {**given, "config": config})
        return report
    return _ask_about(found, given, config)


def ask_against(target: str, named: Mapping[str, str], against: Against, tolerance: float | None) -> AgainstReport:
    """Resolve a target and what goes with it, and compare it with another engine."""
    given = {name: _value(name, text) for name, text in named.items()}
    is_folder = not is_target(target) or Path(target).is_dir()
    found = load_target(target) if is_folder else _found(target, given)
    asked = found if isinstance(found, Mapping | tuple) else (found,)
    config = VerifyConfig(tolerance=tolerance)
    report: AgainstReport = _with_arguments(asked, {**given, "against": against, "config": config})
    return report


def _found(target: str, given: Mapping[str, Any]) -> Any:
    found = resolve_target(target)
    return call_target(target, found) if _is_setup(found, given) else found


def _with_arguments(found: Mapping[str, Any] | tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    """`verify` with the arguments that a function of the user's returned, and those of the command line over them."""
    return verify(**{**found, **given}) if isinstance(found, Mapping) else verify(*found, **given)


def _ask_about(subject: Any, given: dict[str, Any], config: VerifyConfig) -> VerifyReport:
    is_hf = any(base.__name__ == "PreTrainedModel" for base in type(subject).__mro__)
    if "samples" not in given and is_hf:
        given = {
            **given,
            "samples": import_module("truebatch.verification.subjects.hf_subject").random_samples(subject),
        }
    if "samples" not in given and not isinstance(subject, System):
        raise ConfigError(
            "verify needs samples",
            seen=f"a target of type {type(subject).__name__} and no --samples",
            do="add --samples file.py:name (a list, or a function that returns one), about eight of different lengths",
        )
    report: VerifyReport = verify(subject, **given, config=config)
    return report


def _is_setup(found: Any, given: Mapping[str, Any]) -> bool:
    """A function without required arguments makes the subject; with --one or --samples it is the subject."""
    if isinstance(found, nn.Module | System) or not callable(found) or "one" in given:
        return False
    parameters = inspect.signature(found).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _value(name: str, text: str) -> Any:
    """Samples, fields and an objective may be given by a function or a class that makes them."""
    found = resolve_target(text)
    if name == "one" or not callable(found):
        return found
    is_maker = inspect.isclass(found) or (inspect.isfunction(found) and not inspect.signature(found).parameters)
    return call_target(text, found) if is_maker else found
