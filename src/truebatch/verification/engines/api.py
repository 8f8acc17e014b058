"""`verify(..., against=...)`: what a person names as the other engine, found and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from truebatch.errors import ConfigError
from truebatch.import_target import call_target, is_target, resolve_target
from truebatch.progress import stage
from truebatch.verification.config import VerifyConfig
from truebatch.verification.engines.compare_models import compare
from truebatch.verification.engines.compare_server import compare_with_server
from truebatch.verification.engines.counterpart import SPELLINGS, Counterpart, counterpart, is_spelling, plain
from truebatch.verification.engines.report import AgainstReport
from truebatch.verification.engines.server_logprobs import Server
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.subject import Subject

Against = str | Path | nn.Module | Server
PROBES = ("The quick brown fox jumps over 13 lazy dogs.", "批处理 2 次")
"""Texts that two tokenizers should cut alike."""


@stage("comparing with the other engine")
def verify_against(subject: Subject | ListSubject, against: Against, config: VerifyConfig) -> AgainstReport:
    """Compare the model of a subject with another engine, sample by sample."""
    if isinstance(subject, ListSubject) or subject.model is None:
        raise ConfigError(
            "two engines are compared through a model",
            seen="a function without a model whose modules can be watched",
            do="pass a Hugging Face model, or a model with its objective, samples and fields",
        )
    if not any(True for _ in subject.model.parameters()):
        raise ConfigError("the model has no weights", seen=type(subject.model).__name__, do="pass the model itself")
    if isinstance(against, str) and against.lower().startswith(("http://", "https://")):
        against = Server(address=against)
    if isinstance(against, Server):
        return compare_with_server(plain("the model", subject), against, _texts(subject.model))
    report = compare(plain("the model", subject), _other(subject, against), config.tolerance)
    return replace(report, reasons=[*report.reasons, *_tokenizers(subject.model, against)])


def _other(subject: Subject, against: str | Path | nn.Module) -> Counterpart:
    if isinstance(against, nn.Module):
        return plain("the other model", _subject_of(subject, against))
    if isinstance(against, str) and is_spelling(against):
        return counterpart(against, subject)
    name = str(against)
    if not Path(name).is_dir() and not is_target(name):
        raise ConfigError("this is nothing to verify against", seen=name, do=f"give one of {SPELLINGS}")
    return plain(f"the model of {name}", _subject_of(subject, load_target(name)))


def load_target(name: str) -> nn.Module:
    """A model by its folder (an adapter's, too), or by file.py:name or package.module:name."""
    if Path(name).is_dir() or not is_target(name):
        found: Any = import_module("truebatch.hf.model_folders").load_engine(name)
    else:
        found = resolve_target(name)
        found = found if isinstance(found, nn.Module) else call_target(name, found) if callable(found) else found
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"{name} is no model",
            seen=type(found).__name__,
            do="name a model, or a function without arguments that makes one",
        )
    return found


def _subject_of(subject: Subject, model: nn.Module) -> Subject:
    """The same samples through another model; a Hugging Face model is fed as its own head wants."""
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        found: Subject = import_module("truebatch.verification.subjects.hf_subject").hf_subject(model, subject.samples)
        return found
    return replace(subject, model=model)


def _folder_of(model: Any) -> Path | None:
    """Where a Hugging Face model was loaded from, if that is a folder here."""
    name = getattr(model, "name_or_path", "")
    return Path(name) if isinstance(name, str) and name and Path(name).is_dir() else None


def _texts(model: nn.Module) -> list[tuple[str, list[int]]]:
    """Texts, and the ids that the model's own tokenizer makes of them; none where it has no tokenizer."""
    folder = _folder_of(model)
    folders = None if folder is None else import_module("truebatch.hf.model_folders")
    tokenizer = None if folders is None else folders.read_tokenizer(folder)
    if folders is None or tokenizer is None:
        return []
    return [(text, folders.token_ids(tokenizer, text)) for text in PROBES]


def _tokenizers(model: nn.Module, against: Any) -> list[str]:
    """How the tokenizers of two folders differ, where both have one."""
    other = Path(against) if isinstance(against, str | Path) and Path(against).is_dir() else _folder_of(against)
    if other is None:
        return []
    folders = import_module("truebatch.hf.model_folders")
    tokenizer = folders.read_tokenizer(other)
    pairs: Mapping[str, list[int]] = dict(_texts(model)) if tokenizer is not None else {}
    for text, ids in pairs.items():
        there = folders.token_ids(tokenizer, text)
        if there != ids:
            return [
                f"the tokenizers: {text!r} is {ids[:6]} here and {there[:6]} there, {len(ids)} and {len(there)} tokens"
            ]
    return []
