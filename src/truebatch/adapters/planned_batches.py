"""The steps of a dataset for an external trainer: planned once per epoch, read from any step on."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from truebatch.adapters.deepspeed import ENGINE
from truebatch.adapters.single_samples import Collator, SingleSamples, make_single, measure_samples
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import LoadedStep, LoaderConfig, load_steps
from truebatch.errors import ConfigError, DataError
from truebatch.hf.heads.heads import ModelHead, head_of, packed_attention_on
from truebatch.hf.heads.objective import HeadObjective
from truebatch.objective import Objective
from truebatch.planning.config import Overlong, PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.rows import Layout
from truebatch.training.data import measure_by_reading

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Settings an adapter adds to its trainer's: how a step is cut, never what a step is.

    >>> from truebatch.adapters.planned_batches import AdapterConfig
    >>> AdapterConfig(layout="packed", cells=8192).plan_config(samples=8, samples_per_step=32, seed=0).step_size
    'samples_per_step=32'
    """

    layout: Layout = "padded"
    """One sample per row, or several end to end."""
    cells: int | None = None
    """Maximum number of cells in a forward pass."""
    pairs: int | None = None
    """Maximum number of query-key pairs in a forward pass."""
    overlong: Overlong = "refuse"
    """A sample longer than `cells` allows: refuse stops, drop leaves it out, cut keeps its beginning (never of images)."""
    allow: tuple[str, ...] = ()
    """Couplings between samples to allow (for example 'dropout'): results are then equal in distribution only."""

    check_samples: int = 8
    """Samples of the first step that are run alone and as cut before the first update; 0 leaves the check out."""

    def plan_config(self, *, samples: int, samples_per_step: int, seed: int) -> PlanConfig:
        """`samples` is the maximum per forward pass and device; the budgets may cut it smaller."""
        return PlanConfig(
            layout=self.layout,
            cells=self.cells,
            pairs=self.pairs,
            samples=samples,
            samples_per_step=samples_per_step,
            overlong=self.overlong,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedData:
    """A dataset with its lengths and the settings of its plans."""

    samples: SingleSamples
    measured: Measured
    config: PlanConfig

    @property
    def head(self) -> ModelHead:
        """The head the samples are made for."""
        return self.samples.head

    @property
    def num_steps(self) -> int:
        """Steps of an epoch: the same in every epoch, for any number of ranks."""
        per_step = self.config.samples_per_step
        assert per_step is not None
        left_out = len(self.plan(0).samples.dropped_ids) if self.config.overlong == "drop" else 0
        return -(-(len(self.measured.lengths) - left_out) // per_step)

    def plan(self, epoch: int, *, ranks: int = 1) -> Plan:
        """The plan of one epoch."""
        return build_plan(self.measured.lengths, self.config, epoch=epoch, ranks=ranks)

    def load(
        self, epoch: int, *, rank: int = 0, ranks: int = 1, start_step: int = 0, config: LoaderConfig | None = None
    ) -> Generator[LoadedStep, None, None]:
        """The steps of an epoch from `start_step` on; nothing before it is read."""
        plan, samples = self.plan(epoch, ranks=ranks), self.samples.at_epoch(epoch)
        return load_steps(plan, samples, self.head.fields, rank=rank, start_step=start_step, config=config)

    def identity(self) -> dict[str, Any]:
        """What determines which samples share a step, for a checkpoint; ranks and memory are not part of it."""
        return {
            "data": self.measured.fingerprint,
            "samples_per_step": self.config.samples_per_step,
            "seed": self.config.seed,
        }


def plan_data(dataset: Any, collator: Collator, model: nn.Module, config: PlanConfig) -> PlannedData:
    """Measure a dataset and find the head that reads it. Streams without a length are rejected.

    >>> from transformers import default_data_collator
    >>> from truebatch import PlanConfig
    >>> from truebatch.adapters.planned_batches import plan_data
    >>> from truebatch.testing.tiny_hf.random_samples import make_samples
    >>> from truebatch.testing.tiny_hf.model import tiny_model
    >>> model = tiny_model("llama")
    >>> dataset = make_samples(model, [3, 9, 4, 7, 5])
    >>> plan_data(dataset, default_data_collator, model, PlanConfig(samples_per_step=2)).num_steps
    3
    """
    _refuse_streams(dataset)
    first = make_single(dataset, collator, 0, seed=config.seed)
    head = head_of(model, first)
    _refuse_cut_images(head, config)
    samples = SingleSamples(dataset=dataset, collator=collator, head=head, config=model.config, seed=config.seed)
    if head.images is None or _is_tokenized(dataset[0]):
        return PlannedData(samples=samples, measured=measure_samples(dataset), config=config)
    _log.warning("truebatch: the collator is called once for each of %s samples, to measure them", f"{len(dataset):,}")
    return PlannedData(samples=samples, measured=measure_by_reading(samples, head.fields), config=config)


def _is_tokenized(sample: Any) -> bool:
    return isinstance(sample, Mapping) and "input_ids" in sample


def held_attention(
    model: nn.Module, objective: Objective, batches: Sequence[MicroBatch]
) -> AbstractContextManager[None]:
    """Packed attention for forward and backward of these micro-batches: gradient checkpointing runs layers in both."""
    if isinstance(objective, HeadObjective) and "packed" in {objective.route(b) for b in batches if b.num_samples}:
        return packed_attention_on(objective.head, model, "packed")
    return nullcontext()


def bare_model(model: nn.Module) -> nn.Module:
    """Unwrap the Hugging Face model from DDP and from PEFT, whose layers stay inside it."""
    if isinstance(model, nn.parallel.DistributedDataParallel) or type(model).__name__ == ENGINE:
        model = model.module  # type: ignore[assignment]
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:  # type: ignore[union-attr]
        raise ConfigError(
            "PEFT methods that prepend prompts to every row do not work with planned rows",
            seen=f"{type(model.active_peft_config).__name__}",
            do="use LoRA or another method that changes layers, or train without the adapter",
        )
    found: nn.Module = model.get_base_model()  # type: ignore[operator]
    return found


def _refuse_streams(dataset: Any) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            "steps can be planned only for a dataset with a length and access by index",
            seen=f"a {type(dataset).__name__}",
            do="give a map-style dataset, or train on the stream with truebatch.train, which plans it in windows",
        )
    if len(dataset) == 0:
        raise DataError(
            "there is no sample to plan", seen=f"an empty {type(dataset).__name__}", do="give a dataset with samples"
        )


def _refuse_cut_images(head: ModelHead, config: PlanConfig) -> None:
    if head.images is not None and config.overlong == "cut":
        raise ConfigError(
            "a cut could go through an image", seen="overlong='cut'", do="use overlong='drop', or raise cells"
        )
