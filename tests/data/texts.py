"""Texts to load, one of which may misbehave; shared by the tests of the loader and of the watch over its workers."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truebatch.batch.fields import Field
from truebatch.data.loader import LoaderConfig
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan

FIELDS = (
    Field(name="input_ids", pad=-1),
    Field(name="labels", source="input_ids", shift=1, pad=-100),
    Field(name="patches", kind="flat", axis="patches"),
    Field(name="weight", kind="once"),
)
LENGTHS = [3, 17, 5, 9, 1, 12, 8, 8, 2, 30, 4, 6, 11, 7, 19, 1, 13, 5, 5, 10, 3, 2, 27, 6, 9, 4]
BAD = 9
"""The sample that is broken in one way or another."""


class Texts:
    """Samples made from their id; one of them may misbehave."""

    def __init__(self, lengths=LENGTHS, fault: str = "", bad: int = BAD, once: Path | None = None) -> None:
        self.lengths, self.fault, self.bad, self.once = list(lengths), fault, bad, once

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Any:
        if i == self.bad and self.fault and not self._was_seen():
            return misbehave(self.fault)
        rng = np.random.default_rng(i)
        n = self.lengths[i]
        patches = torch.from_numpy(rng.normal(size=(i % 3, 2, 2)))
        return {"input_ids": rng.integers(1, 99, n), "patches": patches, "weight": i / 7}

    def _was_seen(self) -> bool:
        if self.once is None:
            return False
        seen = self.once.exists()
        self.once.touch()
        return seen


def misbehave(fault: str) -> Any:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "segfault":
        faulthandler.disable()  # its report would only blur the output of the tests
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "exit":
        os._exit(3)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang":
        time.sleep(600)
    elif fault == "raise":
        raise OSError("the disk said no")
    elif fault == "leave":
        sys.exit(4)
    elif fault == "list":
        return [1, 2, 3]
    return {"input_ids": [1, 2], "patches": np.zeros((0, 2, 2)), "weight": 0.5}  # shorter than measured


def text_plan(layout="padded", *, ranks=1, epoch=0, lengths=LENGTHS, **more) -> Plan:
    config = PlanConfig(**{"layout": layout, "cells": 40, "samples_per_step": 8, "seed": 3, **more})
    return build_plan(lengths, config, epoch=epoch, ranks=ranks, counts={"tokens": lengths} if not more else None)


def two(**more) -> LoaderConfig:
    return LoaderConfig(**{"workers": 2, "timeout_seconds": 20.0, **more})


def assert_same(first: Any, second: Any) -> None:
    """Equal to the bit, whatever it is made of."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        assert_same(list(first.values()), list(second.values()))
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif hasattr(first, "__dataclass_fields__"):
        for f in dataclass_fields(first):
            assert_same(getattr(first, f.name), getattr(second, f.name))
    else:
        assert first == second


def leave_alone(sample: Any, sample_id: int, epoch: int) -> Any:
    return sample


def add_noise(sample: Any, sample_id: int, epoch: int) -> Any:
    noise = np.random.default_rng((7, epoch, sample_id)).normal()
    return {**sample, "weight": sample["weight"] + noise}
