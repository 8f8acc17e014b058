"""The largest safe budget of cells for a model on its device, measured with the samples that are to be judged.

a few batches, cheap ones first -> bytes at the peak of each -> the line through them -> cells, kept with the run
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from torch import nn

from truebatch.errors import TruebatchError
from truebatch.io.atomic_files import read_json, to_json, write_json
from truebatch.planning.lengths.measured_values import cache_folder
from truebatch.planning.rows import Ints
from truebatch.scoring.backends.interface import Backend, Cost, ScoreRequest
from truebatch.scoring.batch_plan import DEFAULT_CELLS, Limits
from truebatch.scoring.prefetch import attempt
from truebatch.scoring.readouts import Generate, Readout
from truebatch.scoring.store.manifest import MANIFEST, read_manifest
from truebatch.training.memory.cost_model import MemoryFit, Point, Sizes, fit_of_values, fit_points, largest_cells
from truebatch.training.memory.fit import choose_probes
from truebatch.training.memory.measure import added_bytes, free_bytes_of, held_bytes, usable_bytes
from truebatch.training.memory.oom import free_memory, is_out_of_memory

BUDGET = "budget.json"
MEASURED = 256
"""Samples that are looked at for lengths and probes; the dearest of them all are among them."""
SHARES = (0.25, 0.5)
"""Of the memory that is free: what further probes take, so that the line need not reach as far."""
MOST_ROOM = 1.25
"""Times the memory that was free when it was measured: a line is not trusted further."""
_LOCK_SECONDS = 600.0


def settle_limits(limits: Limits, run: Path, measure: Callable[[], int | None]) -> Limits:
    """Limits with a budget: the one given, the one the run began with, the one measured now, or the default.

    Processes that share a run folder agree: the first measures, the others take what it found.
    """
    if limits.cells is not None:
        return limits
    with FileLock(run / ".budget.lock", timeout=_LOCK_SECONDS):
        if (run / BUDGET).is_file():
            return replace(limits, cells=int(read_json(run / BUDGET)["cells"]))
        if (run / MANIFEST).is_file():
            sameness = read_manifest(run).fields.get("sameness", {})
            return replace(limits, cells=int(sameness.get("cells", DEFAULT_CELLS)))
        found = measure() if limits.level != "shape" else None  # a shape must not depend on the GPU it was made on
        if found is not None:
            write_json(run / BUDGET, {"cells": found})
        return replace(limits, cells=found)


class LocalModel(Backend, Protocol):
    """A backend whose model is in this process."""

    model: nn.Module
    readout: Readout


def budget_of(backend: Backend, samples: Sequence[ScoreRequest]) -> int | None:
    """The largest safe budget by the backend's own measurement; None where it has none."""
    fit = getattr(backend, "fit", None)
    return None if fit is None else fit(samples)


def fit_cells(backend: LocalModel, samples: Sequence[ScoreRequest], *, limit_bytes: int | None = None) -> int | None:
    """The most cells of a batch of such samples that memory holds; None where it is not measured: on a CPU, without samples.

    Args:
        limit_bytes: what batches may add to what is there; by default what is free on the device. Given, a CPU is measured.
    """
    device = next(backend.model.parameters()).device
    if device.type != "cuda" and limit_bytes is None:
        return None
    prepared, lengths = _measured(backend, samples)
    if not prepared:
        return None
    has_images = any(getattr(one, "image_hashes", ()) for one in prepared)  # whose patches no length tells
    key = None if has_images else _key_of(backend, device)
    return fit_prepared(backend.judge, prepared, lengths, backend.model, limit_bytes=limit_bytes, key=key)


def fit_prepared(
    judge: Callable[[Sequence[Any]], object], prepared: Sequence[Any], lengths: Ints, model: nn.Module, *,
    limit_bytes: int | None = None, key: str | None = None,
) -> int:  # fmt: skip
    """The same for samples that are prepared and as long as they may become, and any way to judge a batch of them.

    What was measured is kept under `key`, and taken by later runs with samples no longer and not much more memory.
    """
    device = next(model.parameters()).device
    resident = held_bytes([*model.parameters(), *model.buffers()])
    room = usable_bytes(free_bytes_of(device), device) if limit_bytes is None else limit_bytes
    longest = int(lengths.max())
    fit = None if key is None else _kept_fit(key, longest=longest, room=room)
    if fit is None:
        fit = _measure_fit(judge, prepared, lengths, device, resident=resident, room=room)
        if key is not None:
            _keep_fit(key, fit, longest=longest, room=room)
    return max(1, largest_cells(fit, Sizes(lengths), layout="padded", limit_bytes=resident + room))


def _measure_fit(
    judge: Callable[[Sequence[Any]], object], prepared: Sequence[Any], lengths: Ints, device: torch.device, *,
    resident: int, room: int,
) -> MemoryFit:  # fmt: skip
    points = _probe_all(judge, prepared, lengths, choose_probes(Sizes(lengths)), device)
    for share in SHARES:
        fit = _fitted(points, resident)
        cells = largest_cells(fit, Sizes(lengths), layout="padded", limit_bytes=resident + int(share * room))
        points += _probe_all(judge, prepared, lengths, [_dearest(lengths, cells)], device)
    return _fitted(points, resident)


def _key_of(backend: LocalModel, device: torch.device) -> str:
    """The model, how it is run and read, the versions and the GPU: what the memory of a batch depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = to_json({**backend.describe(), "gpu": name, "limits": repr(getattr(backend, "limits", None))})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _file(key: str) -> Path:
    return cache_folder() / "score_budgets" / f"{key}.json"


def _kept_fit(key: str, *, longest: int, room: int) -> MemoryFit | None:
    """What an earlier run has measured; None without one, for longer samples, far more memory, or a damaged file."""
    if not _file(key).is_file():
        return None
    try:
        kept = read_json(_file(key), max_bytes=1 << 20)
        if longest > int(kept["longest"]) or room > MOST_ROOM * int(kept["room"]):
            return None
        return fit_of_values(kept["fit"])
    except (TruebatchError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _keep_fit(key: str, fit: MemoryFit, *, longest: int, room: int) -> None:
    """For later runs; where the folder cannot be written, they measure again."""
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(key), {"fit": fit.to_dict(), "longest": longest, "room": room})
    except OSError:
        return


def _measured(backend: LocalModel, samples: Sequence[ScoreRequest]) -> tuple[list[Any], Ints]:
    """The dearest samples and some others, prepared as long as they may become, and their lengths."""
    priced = [(cost, one) for one in samples if isinstance(cost := attempt(backend.cost, one), Cost)]
    priced.sort(key=lambda one: -(one[0].tokens + one[0].new_tokens))
    half = MEASURED // 2
    chosen = priced[:half] + priced[half :: max(1, len(priced) // half)][:half]
    ready = [(cost, attempt(backend.prepare, one)) for cost, one in chosen]
    good = [(cost.new_tokens, one) for cost, one in ready if not isinstance(one, Exception)]
    lengths = np.array([len(one.ids) + new for new, one in good], dtype=np.int64)
    if isinstance(backend.readout, Generate):
        return [grown(one, new) for new, one in good], lengths
    return [one for _, one in good], lengths


def grown(one: Any, new_tokens: int) -> Any:
    """A prompt that already has what may be generated: one forward pass then takes no less than all of them would."""
    return replace(one, ids=one.ids + (one.ids[-1],) * (new_tokens - 1), max_new_tokens=1)


def _probe_all(
    judge: Callable[[Sequence[Any]], object],
    prepared: Sequence[Any],
    lengths: Ints,
    probes: Sequence[Ints],
    device: torch.device,
) -> list[Point]:
    """What each batch added, up to the first that did not fit."""
    points = []
    for ids in probes:
        some = [prepared[int(i)] for i in ids]
        try:
            added = added_bytes(lambda some=some: judge(some), device=device)  # type: ignore[misc]
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error):
                raise
            added, said = -1, str(error)
        if added < 0:  # outside of the except block: a live traceback would hold the tensors
            free_memory(device, said=said)
            break
        points.append(Point.of(Sizes(lengths[ids]).shape("padded"), added))
    return points


def _fitted(points: Sequence[Point], resident: int) -> MemoryFit:
    return fit_points(points, resident_bytes=resident, optimiser_bytes=0, facts={})


def _dearest(lengths: Ints, cells: int) -> Ints:
    """The first batch of a run under a budget: the longest samples, as many as go into it."""
    order = np.argsort(-lengths, kind="stable")
    return np.asarray(order[: max(1, cells // max(1, int(lengths.max())))])
