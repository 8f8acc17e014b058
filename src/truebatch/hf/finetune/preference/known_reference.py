"""What the reference says of every answer, asked once before training and kept beside the run.

model as training begins -> log-probabilities of all pairs, dealt to ranks -> reference.npz with its fingerprint -> samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from truebatch.batch.fields import Field
from truebatch.data.loader import load_steps
from truebatch.errors import RunError
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.preference.evaluate import FIELDS
from truebatch.hf.finetune.preference.objective import REFERENCE, PairObjective
from truebatch.hf.finetune.token_store import TokenStore
from truebatch.hf.preference.logprobs import without_adapters
from truebatch.io.array_files import read_arrays, write_arrays
from truebatch.io.atomic_files import storage_error
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Layout
from truebatch.training.distributed.collectives import all_gather_list, broadcast_from_rank0, num_ranks, rank
from truebatch.training.distributed.device import find_device
from truebatch.training.exactness.digest import joint_digest, parameter_digests
from truebatch.training.memory.oom import free_memory, is_out_of_memory

FILE = "reference.npz"
CELLS = 8192
"""Of a row, unless one pair has more; fewer only where memory runs out."""
REFERENCE_FIELD = Field(name=REFERENCE, kind="once", dtype="float32", host=True)
"""NaN until it is known."""
Floats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PairsWithReference:
    """Encoded pairs, each with what the reference says of its two answers."""

    pairs: TokenStore
    values: Floats = field(init=False)
    """[N, 2]; NaN until `know_reference` has asked."""

    def __post_init__(self) -> None:
        self.values = np.full((len(self.pairs), 2), np.nan, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, sample_id: int, /) -> dict[str, Any]:
        return {**self.pairs[sample_id], REFERENCE: self.values[sample_id]}


def know_reference(
    config: FinetuneConfig, objective: PairObjective, data: Mapping[str, PairsWithReference], model: nn.Module,
    folder: Path, *, layout: Layout, content: str,
) -> None:  # fmt: skip
    """Fill in what the reference says: as this run has kept it, or asked now of the model that is about to be trained.

    All ranks call it, before a checkpoint is loaded: the model is still the one that training began with.
    """
    identity = {"model": _fingerprint(model, config), "data": content, "precision": config.train.precision}
    kept = broadcast_from_rank0(_kept(folder / FILE, identity) if rank() == 0 else None)
    if kept is None:
        kept = {name: _ask(config, objective, pairs, model, layout) for name, pairs in data.items()}
        if rank() == 0:
            _keep(folder, kept, identity)
    for name, pairs in data.items():
        pairs.values[: len(kept[name])] = kept[name]
    objective.reference.model = None  # what was measured before may have loaded it


def _fingerprint(model: nn.Module, config: FinetuneConfig) -> str:
    """Of the weights that are asked: those of an adapter say nothing."""
    digests = parameter_digests(model)
    return joint_digest({name: one for name, one in digests.items() if not (config.lora and "lora_" in name)})


def _kept(file: Path, identity: Mapping[str, str]) -> dict[str, Floats] | None:
    """What an earlier start of this run has kept; None where nothing is there that can be read."""
    found = read_arrays(file)
    if found is None:
        return None
    arrays, about = found
    changed = [name for name in identity if about.get(name) != identity[name]]
    if changed:
        raise RunError(
            "the reference of this run was asked about something else",
            seen=f"another {', '.join(changed)} than in {file}",
            do="bring the model folder and the data back as they were, or begin another run with --out",
        )
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def _keep(folder: Path, kept: Mapping[str, Floats], identity: Mapping[str, str]) -> None:
    try:
        write_arrays(folder / FILE, kept, identity)
    except OSError as error:
        raise storage_error(RunError, error, what=FILE, folder=folder) from error


def _ask(
    config: FinetuneConfig, objective: PairObjective, pairs: PairsWithReference, model: nn.Module, layout: Layout
) -> Floats:
    """[N, 2] of the first pairs, as many as are trained on, in rows that follow from the pairs alone."""
    number = min(len(pairs), config.train.limit or len(pairs))
    lengths = pairs.pairs.columns["input_ids"].lengths()[:number]
    cells = max(CELLS, int(lengths.max()))
    while True:
        try:
            return _ask_in_rows(config, objective, pairs, model, layout, lengths, cells)
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error) or cells <= int(lengths.max()) or num_ranks() > 1:
                raise
        free_memory(find_device(config.train).device)
        cells = max(cells // 2, int(lengths.max()))


@torch.no_grad()
def _ask_in_rows(
    config: FinetuneConfig, objective: PairObjective, pairs: PairsWithReference, model: nn.Module, layout: Layout,
    lengths: npt.NDArray[np.int64], cells: int,
) -> Floats:  # fmt: skip
    place = find_device(replace(config.train, choose=(), compile=False))
    was_training = model.training
    model.to(place.device).eval()
    plan = build_plan(lengths, PlanConfig(layout=layout, cells=cells, samples_per_step=len(lengths)))
    found: list[tuple[int, list[float]]] = []
    with closing(load_steps(plan, pairs.pairs, FIELDS)) as steps:
        for at, batch in enumerate(batch for step in steps for batch in step):
            if at % num_ranks() != rank():
                continue
            moved = batch.to(place.device)
            with (
                place.autocast(),
                objective.hold(model, moved),
                without_adapters(model) if config.lora else nullcontext(),
            ):
                values = objective.log_probs(model, moved).float().tolist()
            found += list(zip(batch.sample_ids, values, strict=True))
    model.train(was_training)
    return _in_order(all_gather_list(found), len(lengths))


def _in_order(found: Sequence[tuple[int, list[float]]], number: int) -> Floats:
    values = np.full((number, 2), np.nan, dtype=np.float32)
    for sample_id, both in found:
        values[sample_id] = both
    return values
