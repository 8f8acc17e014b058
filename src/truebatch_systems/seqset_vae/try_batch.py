"""Try batch sizes on the user's stays: shapes, padding, memory, and whether a batch equals one stay at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truebatch.attention.score_rule import without_cudnn_sdpa
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.objective import divide_once
from truebatch.reports.progress_display import peak_memory_bytes
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
    """Of the original script's batch dictionary, for the first batch."""
    num_padding: int
    """Cells of it that hold nothing."""
    padded_share: float
    """Of all its cells."""
    layout_share: float
    """Share of empty cells in the layout that is trained with, where sets of similar size lie together."""
    stays: int
    """Compared and timed: the same ones for every size."""
    difference: float
    """Largest difference of a logit to that of one stay at a time, over all these stays."""
    bytes_added: int
    """Memory of the forward and backward pass of the largest batch, beyond model and data."""
    peak_bytes: int
    """Of this process so far, or of the GPU during the largest batch."""
    stays_per_second: float

    @property
    def is_equal(self) -> bool:
        """Whether the batch gives what its stays give alone."""
        return self.difference <= TOLERANCE


def try_batches(config: SeqSetConfig, batch_sizes: Sequence[int]) -> Iterator[BatchSizeTrial]:
    """One trial for each size on the same training stays, with an untrained model of the configured shape.

    As many stays as the largest size. Without dynamic padding, the original script's dictionary is as wide as
    `max_events`, or as the longest stay of the data.
    """
    wrong = next((size for size in batch_sizes if size < 1), None)
    if wrong is not None:
        raise ConfigError("a batch holds at least one stay", seen=f"batch size {wrong}", do="give 1 or more")
    ready = prepare(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = SeqSetVAE(config.model, torch.from_numpy(ready.variables.vectors)).to(device)
    width = None if config.use_dynamic_padding else config.max_events or ready.most_events
    samples = [ready.train[i] for i in range(min(max(batch_sizes), len(ready.train)))]
    trial = _Trial(ready, model, SeqSetObjective(loss=config.loss), samples, width)
    for size in batch_sizes:
        yield trial.run(size)


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """What all sizes share."""

    ready: PreparedStays
    model: SeqSetVAE
    objective: SeqSetObjective
    samples: list[dict[str, Any]]
    width: int | None

    def run(self, size: int) -> BatchSizeTrial:
        """One size: shapes of its first batch, and all stays compared and timed."""
        device = next(self.model.parameters()).device
        groups = [self.samples[start : start + size] for start in range(0, len(self.samples), size)]
        batches = [micro_batch(group, width=self.width).to(device) for group in groups]
        note = note_batch(groups[0], self.ready.variables, max_sequence_length=self.width)
        largest = max(batches, key=lambda batch: batch.is_real.numel())
        taken = added_bytes(lambda: self._step(largest), device=device)
        peak = peak_memory_bytes()
        layout = look_at(self.model, batches[0]).inputs.layout
        validation = self.ready.validation
        return BatchSizeTrial(
            batch_size=size,
            training_batches=-(-len(self.ready.train) // size),
            validation_batches=-(-len(validation) // size) if validation is not None else 0,
            shapes={name: tuple(value.shape) for name, value in note.items()},
            num_padding=int((~batches[0].is_real).sum()),
            padded_share=padded_share(batches[0])["events"],
            layout_share=1 - len(layout.event_order) / max(layout.num_cells, 1),
            stays=len(self.samples),
            difference=self._difference(batches),
            bytes_added=taken,
            peak_bytes=peak,
            stays_per_second=len(self.samples) / _seconds(lambda: self._steps(batches), device),
        )

    def _steps(self, batches: Sequence[MicroBatch]) -> None:
        for batch in batches:
            self._step(batch)

    def _step(self, batch: MicroBatch) -> None:
        with noise_for(batch, seed=0), without_cudnn_sdpa(batch["var"].device):
            loss = divide_once(self.objective.sums(self.model.train(), batch), self.objective.counts(batch))
            loss.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)

    def _difference(self, batches: Sequence[MicroBatch]) -> float:
        device = batches[0]["var"].device
        together = torch.cat([look_at(self.model, batch).outputs.logits for batch in batches])
        alone = [look_at(self.model, micro_batch([one]).to(device)).outputs.logits for one in self.samples]
        return float((together - torch.cat(alone)).abs().max())


def _seconds(work: Callable[[], None], device: torch.device, *, passes: int = 3) -> float:
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
        f"    - memory of a step: {trial.bytes_added / 2**20:.1f} MB; peak memory: {trial.peak_bytes / 2**30:.2f} GiB",
        f"    - the same {trial.stays} stays at every size: {trial.stays_per_second:.1f} stays/s",
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
