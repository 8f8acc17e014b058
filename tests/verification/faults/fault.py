"""What a planted fault is: a model, how it is asked, and what a person should be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.verification import planted as P
from truebatch.batch.fields import Field
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig

IDS = (Field(name="input_ids"),)
LENGTHS = [3, 17, 9, 24, 5, 12]


@dataclass(frozen=True)
class Fault:
    """A planted fault. `causes` are the names that would be right; `says` must all stand in the words."""

    name: str
    build: Callable[[], Any]
    causes: tuple[str, ...]
    says: tuple[str, ...] = ()
    objective: Callable[[], Any] | None = None
    fields: tuple[Field, ...] = IDS
    layout: str = "right"
    data: Callable[[], list[dict[str, Any]]] | None = None
    causal: bool | None = None


FAULTS: dict[str, Fault] = {}


def fault(name, *causes, says="", **given):
    """Register a model class (or a function that builds a model) as a fault."""

    def register(build):
        assert name not in FAULTS
        words = (says,) if isinstance(says, str) else tuple(says)
        FAULTS[name] = Fault(name, build, causes, tuple(w for w in words if w), **given)
        return build

    return register


def samples(seed=0):
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(1, 40, n), "label": int(n % 3)} for n in LENGTHS]


def ask(found: Fault):
    """The report on one fault."""
    torch.manual_seed(0)
    model = found.build()
    data = (found.data or samples)()
    config = VerifyConfig(layout=found.layout, causal=found.causal)
    if found.objective is None:
        return verify(model, samples=data, fields=found.fields, config=config)
    return verify(model, found.objective(), data, found.fields, config=config)


def judged(found: Fault, report) -> str:
    """missed, right, misleading or unknown: whether the first cause is the one a person needs."""
    if report.ok:
        return "missed"
    if not report.causes and "other numbers each time" in report.unproven:
        is_right = "randomness is not keyed by sample" in found.causes and all(w in report.unproven for w in found.says)
        return "right" if is_right else "misleading"
    if not report.causes:
        return "nothing said"
    first = report.causes[0]
    text = " ".join(f"{c.name} {c.words} {c.fix}" for c in report.causes[:1]) + f" {report.first_module}"
    if first.name in found.causes and all(w in text for w in found.says):
        return "right"
    return "unknown" if first.name == "unknown" else "misleading"


CLASS, TEXT = P.CLASS_FIELDS, P.FIELDS
