"""Planned steps and the exact loss for any Hugging Face Trainer: `class MyTrainer(TruebatchMixin, Trainer)`.

The trainer's loop takes `gradient_accumulation_steps` items per update. It gets exactly that many, each with some of
the step's micro-batches (or none): its counters, callbacks, schedules, logs and checkpoints need not know.

train_dataset, collator -> plan -> step by its number -> items of the loop -> sums / counts -> sum over ranks -> update
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from truebatch.adapters.deepspeed import plain_leaves
from truebatch.adapters.planned_batches import AdapterConfig, PlannedData, bare_model, held_attention, plan_data
from truebatch.adapters.step_loss import hand_over, take_step
from truebatch.adapters.unsupported import refuse_settings
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import LoadedStep, LoaderConfig
from truebatch.errors import BatchError, DataError, RunError
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.checks.batch_coupling import find_couplings, refuse_couplings
from truebatch.training.checks.first_step import ANY_COUPLING, FirstStep, check_loop
from truebatch.training.distributed.collectives import num_ranks, rank, reduce_gradients, sum_over_ranks
from truebatch.training.memory.oom_retry import OomGuard
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import StepEngine, accumulate, step_counts
from truebatch.training.validation import evaluate_loss

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_log = logging.getLogger(__name__)


class StepRecord(TrainerCallback, ExportableState):  # type: ignore[misc]
    """What determines the steps, saved in `trainer_state.json`: a checkpoint made with other steps is rejected."""

    def __init__(self, data: str = "", samples_per_step: int = 0, seed: int = 0) -> None:
        self.identity = {"data": data, "samples_per_step": samples_per_step, "seed": seed}

    def state(self) -> dict[str, Any]:
        """As transformers stores callbacks."""
        return {"args": self.identity, "attributes": {}}


class ItemNumbers(Dataset[int]):
    """The items of an epoch by number; item k belongs to step k // items_per_step."""

    def __init__(self, num_items: int, num_samples: int) -> None:
        self.num_items, self.num_samples = num_items, num_samples
        self.epoch: int | None = None

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, number: int) -> int:
        return number


class ItemLoader(DataLoader[int]):
    """The indices that the trainer's loop counts and skips. A skipped index costs nothing: no data is read for it."""

    def __init__(self, numbers: ItemNumbers) -> None:
        # A separate generator: the loader must not draw from the one that dropout uses.
        super().__init__(numbers, collate_fn=_only, generator=torch.Generator())

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before every epoch."""
        numbers = self.dataset
        assert isinstance(numbers, ItemNumbers)
        numbers.epoch = epoch


def _only(numbers: list[int]) -> int:
    return numbers[0]


class OpenStep:
    """The current step, and what its loss is divided by."""

    def __init__(self, step: LoadedStep, counts: dict[str, int]) -> None:
        self.step, self.counts = step, counts

    @property
    def sample_ids(self) -> list[int]:
        """This rank's samples."""
        return [i for batch in self.step for i in batch.sample_ids]


class Item(dict[str, Tensor]):
    """One item of the trainer's loop: some micro-batches of a step, with their ids for its token counters."""

    def __init__(self, batches: Sequence[MicroBatch], of: OpenStep, *, is_last: bool) -> None:
        ids = [batch["input_ids"].flatten() for batch in batches]
        real = [batch.is_real.flatten() for batch in batches]
        empty = torch.zeros(0, dtype=torch.int64)
        super().__init__(input_ids=torch.cat([empty, *ids]), attention_mask=torch.cat([empty, *real]))
        self.of, self.is_last = of, is_last


class TruebatchMixin(_Trainer):  # type: ignore[misc]
    """Put it before a Trainer: `class MyTrainer(TruebatchMixin, Trainer)`, then use it as before.

    A step is per_device_train_batch_size x gradient_accumulation_steps x devices samples, planned by length; a forward
    pass holds at most per_device_train_batch_size of them, less where `truebatch=AdapterConfig(cells=...)` says so. The
    loss is summed from logits and divided once over the step and all ranks; so are the logged loss and `eval_loss`.
    The user's collator is called with one sample at a time. `resume_from_checkpoint` continues with the next step.
    What cannot be exact is refused with a reason.
    """

    def __init__(self, *args: Any, truebatch: AdapterConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truebatch = truebatch or AdapterConfig()
        self._planned: PlannedData | None = None
        self._guard: OomGuard | None = None
        self._steps: Generator[LoadedStep, None, None] | None = None
        self._place: tuple[int, int] = (-1, -1)
        self._has_learned = False
        refuse_settings(self, TruebatchMixin)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Like the trainer's own; rejects models whose result would depend on how a step is cut."""
        refuse_settings(self, TruebatchMixin)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_steps()

    def get_train_dataloader(self) -> DataLoader[int]:
        """The indices of an epoch's items; their steps are planned here and read in `get_batch_samples`."""
        given = super().get_train_dataloader()
        self._refuse_couplings()
        config = self.truebatch.plan_config(
            samples=self.args.per_device_train_batch_size,
            samples_per_step=self.get_total_train_batch_size(self.args),
            seed=self._data_seed(),
        )
        planned = plan_data(given.dataset, given.collate_fn, bare_model(self.model), config)
        self._close_steps()
        self._planned, self._guard = planned, OomGuard(fields=planned.head.fields, say=_log.warning)
        self.remove_callback(StepRecord)
        self.add_callback(StepRecord(**planned.identity()))
        items = planned.num_steps * self.args.gradient_accumulation_steps
        return ItemLoader(ItemNumbers(items, len(planned.measured.lengths)))

    def num_examples(self, dataloader: Any) -> int:
        """Number of samples in a dataloader's dataset."""
        numbers = getattr(dataloader, "dataset", None)
        return numbers.num_samples if isinstance(numbers, ItemNumbers) else int(super().num_examples(dataloader))

    def get_batch_samples(
        self, epoch_iterator: Iterator[int], num_batches: int, device: torch.device
    ) -> tuple[list[Item], None]:
        """All items of the next step, found by its number."""
        numbers = list(islice(epoch_iterator, num_batches))
        if not numbers:
            return [], None
        step = self._read_step(numbers[0] // self.args.gradient_accumulation_steps)
        counts = step_counts(step.batches, self._objective(), step.counts, device=device)
        self._name_nothing_learned(step, counts)
        return _items(OpenStep(step, counts), len(numbers)), None

    def _name_nothing_learned(self, step: LoadedStep, counts: dict[str, int]) -> None:
        """A step without a label has a loss of 0 and no gradient: the first one stops the training, later ones are named."""
        if any(counts.values()):
            self._has_learned = True
            return
        ids = [i for batch in step.batches for i in batch.sample_ids]
        if self._has_learned:
            _log.warning("truebatch: step %s has nothing to learn from: samples %s", step.number, ids[:16])
            return
        raise DataError(
            "the first step has nothing to learn from: all labels of its samples are -100",
            seen=f"samples {ids[:16]}, step {step.number}",
            do="check what sets the labels: a collator that masks prompts and finds no answer, or padding that is also the "
            "end token",
        )

    def training_step(self, model: nn.Module, inputs: Item, num_items_in_batch: Any = None) -> Tensor:
        """At the last item of a step: forward and backward, all-reduce and the true loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if not inputs.is_last:
            return torch.zeros((), device=self.args.device)
        take = self._take_for_deepspeed if getattr(self, "is_deepspeed_enabled", False) else self._take
        loss = take(model, inputs.of)
        self._empty_cache()
        return loss

    def _take(self, model: nn.Module, opened: OpenStep) -> Tensor:
        """The gradient of the whole step in `.grad`, summed over ranks, and its true loss.

        The step is run in its last item, so that running out of memory loses nothing of an earlier one.
        """
        engine = self._engine(model, groups=(Group(optimiser=self.optimizer),))
        self._check_first_step(engine, opened)
        with held_attention(engine.model, engine.objective, opened.step.batches):
            sums = accumulate(engine, opened.step.batches, opened.counts, epoch=self._place[0])
        reduce_gradients([p for p in model.parameters() if p.requires_grad])
        parts = [value / max(opened.counts[name], 1) for name, value in sums.items()]
        loss = torch.stack(parts).sum() if parts else torch.zeros((), device=self.args.device)
        return self._finite(opened, sum_over_ranks(loss))

    def _take_for_deepspeed(self, model: nn.Module, opened: OpenStep) -> Tensor:
        """The true loss of the step; DeepSpeed's engine gets its gradient in one backward, which also updates the
        parameters."""
        wanted = [p for p in bare_model(model).parameters() if p.requires_grad]
        with plain_leaves(bare_model(model)) as leaves:
            engine = self._engine(model, groups=(Group(optimiser=torch.optim.SGD(leaves)),))
            self._check_first_step(engine, opened)
            loss, taken = take_step(engine, opened.step, epoch=self._place[0], counts=opened.counts)
        loss = self._finite(opened, loss)
        self.accelerator.backward(hand_over(loss, taken, wanted), scale_wrt_gas=False)
        return loss

    def _check_first_step(self, engine: StepEngine, opened: OpenStep) -> None:
        """Before the first update of this process: a few samples alone and as they were cut."""
        config = self.truebatch
        first = FirstStep(
            engine=engine, batches=opened.step.batches, fields=opened.step.fields, epoch=self._place[0],
            number=config.check_samples, allow=(*config.allow, *ANY_COUPLING),
            couplings=tuple(find_couplings(engine.model)),
        )  # fmt: skip
        check_loop(first, say=_log.warning)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The exact loss over the whole dataset; predictions, if requested, come from the trainer's own code."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if loss_only:
            output = EvalLoopOutput(
                predictions=None, label_ids=None, metrics={}, num_samples=self.num_examples(dataloader)
            )
        else:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        name = f"{metric_key_prefix}_loss"
        if loss_only or name in output.metrics:
            output.metrics[name] = self._exact_loss(dataloader)
        return output

    def _refuse_couplings(self) -> None:
        self.model.train()  # as it will be: batch statistics couple samples only then
        allowed = sorted({coupling.name for coupling in refuse_couplings(self.model, self.truebatch.allow)})
        if allowed:
            _log.warning("truebatch: equal in distribution only, because %s is allowed", ", ".join(allowed))

    def _exact_loss(self, dataloader: Any) -> float:
        config = self.truebatch.plan_config(
            samples=self.args.per_device_eval_batch_size,
            samples_per_step=self.args.per_device_eval_batch_size * self.args.world_size,
            seed=self._data_seed(),
        )
        planned = plan_data(dataloader.dataset, dataloader.collate_fn, bare_model(self.model), config)
        engine = self._engine(self.model, groups=(), planned=planned)
        self.model.to(self.args.device).eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        terms = evaluate_loss(engine, planned.samples, planned.measured, planned.head.fields, config)
        return sum(terms.values())

    def _engine(self, model: nn.Module, groups: tuple[Group, ...], planned: PlannedData | None = None) -> StepEngine:
        """The model without its DDP wrapper: gradients are summed once per step, not in every backward."""
        return StepEngine(
            model=bare_model(model),
            objective=self._objective(planned),
            groups=groups,
            device=self.args.device,
            autocast=self._autocast,
            scaler=getattr(self.accelerator, "scaler", None),
            seed=self._data_seed(),
            guard=self._guard_of(planned),
        )

    def _guard_of(self, planned: PlannedData | None) -> OomGuard:
        """The training's splitter, with what it has learnt about memory; a new one for anything else."""
        if planned is not None or self._guard is None:
            return OomGuard(fields=(planned or self._planned).head.fields, say=_log.warning)  # type: ignore[union-attr]
        return self._guard

    def _autocast(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.accelerator.autocast()
        return context

    def _objective(self, planned: PlannedData | None = None) -> HeadObjective:
        planned = planned or self._planned
        assert planned is not None, "get_train_dataloader comes before the first step"
        return HeadObjective(head=planned.head)

    def _data_seed(self) -> int:
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _read_step(self, number: int) -> LoadedStep:
        """The step with this number in the current epoch; a new epoch, or a jump, opens the loader there."""
        planned = self._planned
        assert planned is not None
        numbers = self.callback_handler.train_dataloader.dataset
        # A loop that resumed mid-epoch uses a separate loader, on which set_epoch was not called.
        epoch = numbers.epoch if numbers.epoch is not None else self.state.global_step // planned.num_steps
        if self._steps is None or self._place != (epoch, number):
            self._refuse_other_steps(planned)
            self._close_steps()
            self._steps = planned.load(
                epoch, rank=rank(), ranks=num_ranks(), start_step=number, config=self._loader_config()
            )
        self._place = (epoch, number + 1)
        return next(self._steps)

    def _loader_config(self) -> LoaderConfig:
        return LoaderConfig(
            workers=self.args.dataloader_num_workers,
            prefetch=self.args.dataloader_prefetch_factor or 2,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def _close_steps(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps, self._place = None, (-1, -1)

    def _refuse_other_steps(self, planned: PlannedData) -> None:
        saved = self.state.stateful_callbacks.get(StepRecord.__name__, {})
        saved = (saved[0] if isinstance(saved, list) else saved).get("args", planned.identity())
        wrong = {k: (v, planned.identity()[k]) for k, v in saved.items() if v != planned.identity()[k]}
        if wrong and self.state.global_step:
            name, (then, now) = next(iter(wrong.items()))
            raise RunError(
                "the checkpoint was made with other steps, so its number of steps means other samples",
                seen=f"{name}={then!r} in the checkpoint, {now!r} now",
                do="keep the data, the seed and per_device_train_batch_size x gradient_accumulation_steps x devices",
            )

    def _empty_cache(self) -> None:
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _finite(self, opened: OpenStep, loss: Tensor) -> Tensor:
        """The loss of a step; one that is NaN or infinite stops the training before the update, naming the samples."""
        if not math.isfinite(float(loss)):
            raise BatchError(
                f"the loss of step {opened.step.number} of this epoch is {float(loss)}",
                seen=f"samples {opened.sample_ids[:16]} on rank {rank()}, update {self.state.global_step}",
                do="check these samples and the learning rate; the last checkpoint is from before this step",
            )
        return loss


def _items(opened: OpenStep, number: int) -> list[Item]:
    """The micro-batches of a step over the items of one update, in order; every micro-batch in exactly one."""
    batches = opened.step.batches
    ends = [len(batches) * (k + 1) // number for k in range(number)]
    starts = [0, *ends[:-1]]
    return [
        Item(batches[start:end], opened, is_last=k == number - 1)
        for k, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
