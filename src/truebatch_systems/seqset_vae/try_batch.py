"""Try batch sizes on the user's stays: shapes, padding, memory, and whether a batch equals one stay at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.keyed_random import noise_for
from truebatch.errors import ConfigError
from truebatch.objective import divide_once
from truebatch.training.memory.measure import added_bytes
from truebatch_systems.seqset_vae.compat import micro_batch, note_batch, padded_share
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.prepare import PreparedStays, prepare
from truebatch_systems.seqset_vae.model.model import SeqSetVAE
from truebatch_systems.seqset_vae.train.loss import SeqSetObjective, look_at

TOLERANCE = 1e-5
"""Largest difference of a logit to the one of the stay alone."""


@dataclass(frozen=True, slots=True)
class BatchSizeTrial:
    """What one batch size comes to on the first stays."""

    batch_size: int
    training_batches: int
    validation_batches: int
    shapes: dict[str, tuple[int, ...]]
    """Of the original script's batch dictionary."""
    num_padding: int
    """Cells of it that hold nothing."""
    padded_share: float
    """Of all its cells."""
    layout_share: float
    """Share of empty cells in the layout that is trained with, where sets of similar size lie together."""
    difference: float
    """Largest difference of a logit to that of one stay at a time."""
    bytes_added: int
    """Memory of one forward and backward pass, beyond model and data."""
    stays_per_second: float

    @property
    def is_equal(self) -> bool:
        """Whether the batch gives what its stays give alone."""
        return self.difference <= TOLERANCE


def try_batches(
    config: SeqSetConfig, batch_sizes: Sequence[int], *, max_sequence_length: int | None = None
) -> Iterator[BatchSizeTrial]:
    """One trial for each size on the first training stays, with an untrained model of the configured shape.

    `max_sequence_length` pads the original script's dictionary to that many events; else it is as wide as its longest stay.
    """
    wrong = next((size for size in batch_sizes if size < 1), None)
    if wrong is not None:
        raise ConfigError("a batch holds at least one stay", seen=f"batch size {wrong}", do="give 1 or more")
    ready = prepare(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = SeqSetVAE(config.model, torch.from_numpy(ready.variables.vectors)).to(device)
    objective = SeqSetObjective(loss=config.loss)
    for size in batch_sizes:
        yield _try_batch(ready, model, objective, size, max_sequence_length)


def _try_batch(
    ready: PreparedStays, model: SeqSetVAE, objective: SeqSetObjective, size: int, width: int | None
) -> BatchSizeTrial:
    device = next(model.parameters()).device
    samples = [ready.train[i] for i in range(min(size, len(ready.train)))]
    note = note_batch(samples, ready.variables, max_sequence_length=width)
    batch = micro_batch(samples, width=width).to(device)

    def work() -> None:
        with noise_for(batch, seed=0), without_cudnn_sdpa(device):
            loss = divide_once(objective.sums(model.train(), batch), objective.counts(batch))
            loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    taken = added_bytes(work, device=device)
    together = look_at(model, batch)
    alone = torch.cat([look_at(model, micro_batch([one]).to(device)).outputs.logits for one in samples])
    layout = together.inputs.layout
    return BatchSizeTrial(
        batch_size=size,
        training_batches=-(-len(ready.train) // size),
        validation_batches=-(-len(ready.validation) // size) if ready.validation is not None else 0,
        shapes={name: tuple(value.shape) for name, value in note.items()},
        num_padding=int((~batch.is_real).sum()),
        padded_share=padded_share(batch)["events"],
        layout_share=1 - len(layout.event_order) / max(layout.num_cells, 1),
        difference=float((together.outputs.logits - alone).abs().max()),
        bytes_added=taken,
        stays_per_second=len(samples) / _seconds(work, device),
    )


def _seconds(work: Any, device: torch.device, *, passes: int = 3) -> float:
    """The fastest of a few passes."""
    found = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def note_lines(trial: BatchSizeTrial) -> list[str]:
    """A trial in the words of the original test script."""
    return [
        f"📊 Testing batch size: {trial.batch_size}",
        "-" * 30,
        f"  - Training batches: {trial.training_batches}",
        f"  - Validation batches: {trial.validation_batches}",
        "  - Batch 1:",
        *(f"    - {name} shape: {torch.Size(shape)}" for name, shape in trial.shapes.items()),
        *([f"    - padding_mask sum: {trial.num_padding}"] if "padding_mask" in trial.shapes else []),
        f"    - padding: {trial.padded_share:.0%} of the cells above; {trial.layout_share:.0%} in the layout trained with",
        f"    - memory of a step: {trial.bytes_added / 2**20:.1f} MB; {trial.stays_per_second:.1f} stays/s",
        *_verdict(trial),
    ]


def _verdict(trial: BatchSizeTrial) -> list[str]:
    found = f"largest difference to one stay at a time: {trial.difference:.1e}"
    if not trial.is_equal:
        return [f"    ❌ Forward pass differs ({found})"]
    return [
        f"    ✅ Forward pass successful ({found})",
        f"  ✅ Batch size {trial.batch_size} test completed successfully",
    ]
