"""Lightning with planned steps; skipped where lightning is not installed (the extra `lightning`)."""

from __future__ import annotations

import pytest
import torch
from transformers import default_data_collator

from tests.adapters.started import run_two
from tests.adapters.trainers import HEADS, LENGTHS, build, gradient_of, one_by_one, relative, sum_and_count
from truebatch.adapters.planned_batches import plan_data
from truebatch.errors import ConfigError, RunError
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.config import PlanConfig
from truebatch.testing.failpoints import armed

L = pytest.importorskip("lightning.pytorch")
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def planned(case, model, samples, **given):
    config = PlanConfig(**({"samples_per_step": 5, "cells": 32} | given))
    return plan_data(samples, default_data_collator, model, config)


def module_of(case, *, automatic=True, rate=0.0):
    from truebatch.adapters.lightning import lightning_eval_loss, lightning_loss

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.samples = build(case)
            self.automatic_optimization = automatic
            self.found, self.losses, self.eval_losses = [], [], []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9 if rate else 0.0)

        def training_step(self, step, batch_idx):
            loss = lightning_loss(self, self.model, HeadObjective(head=self.data.head), step)
            self.losses.append(loss.item())
            if automatic:
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.found.append(gradient_of(self.model))
            return self.optimizers().step()

        def on_before_optimizer_step(self, optimizer):
            if automatic:
                self.found.append(gradient_of(self.model))

        def on_train_epoch_end(self):
            self.eval_losses.append(lightning_eval_loss(self, self.model, self.data))

    return Net()


def fit(folder, module, *, resume=None, callbacks=(), **given):
    from truebatch.adapters.lightning import PlannedDataModule

    plan_given = {k: given.pop(k) for k in ("layout", "samples_per_step") if k in given}
    module.data = planned("", module.model, module.samples, **plan_given)
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": bool(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "max_epochs": 1,
    }
    trainer = L.Trainer(**(settings | given), callbacks=list(callbacks))
    trainer.fit(module, PlannedDataModule(module.data), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize(("case", "layout"), [*((case, "padded") for case in HEADS), ("causal_lm", "packed")])
def test_every_training_step_is_the_gradient_of_its_samples_one_by_one(tmp_path, case, layout, automatic):
    module = module_of(case, automatic=automatic)
    trainer = fit(tmp_path, module, layout=layout)
    plan = module.data.plan(0)
    assert trainer.global_step == plan.num_steps == len(module.found) == 3
    for k, gradient in enumerate(module.found):
        expected, loss = one_by_one(case, module.model, [module.samples[i] for i in plan.step_sample_ids(k)])
        assert relative(gradient, expected) <= 1e-6
        assert module.losses[k] == pytest.approx(loss, rel=1e-5)
    pairs = [sum_and_count(case, module.model, sample) for sample in module.samples]
    whole = sum(total for total, _ in pairs).item() / sum(count for _, count in pairs)
    assert module.eval_losses == [pytest.approx(whole, rel=1e-5)]


def test_memory_that_runs_out_changes_only_the_cut(tmp_path):
    expected, found = module_of("causal_lm"), module_of("causal_lm")
    fit(tmp_path, expected)
    with armed("step.backward:oom:2"):
        fit(tmp_path, found)
    assert len(found.found) == len(expected.found)
    assert all(relative(a, b) <= 1e-6 for a, b in zip(found.found, expected.found, strict=True))


def test_every_epoch_is_planned_anew(tmp_path):
    module = module_of("causal_lm")
    fit(tmp_path, module, max_epochs=3)
    for epoch in range(3):
        plan = module.data.plan(epoch)
        for k in range(3):
            expected, _ = one_by_one("causal_lm", module.model, [module.samples[i] for i in plan.step_sample_ids(k)])
            assert relative(module.found[3 * epoch + k], expected) <= 1e-6


def stop_after(folder, step):
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == step:
                trainer.save_checkpoint(folder / "stopped.ckpt")
                trainer.should_stop = True

    return Stop()


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 8])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, stop):
    whole = module_of("causal_lm", rate=0.1)
    fit(tmp_path, whole, max_epochs=3)
    first, second = module_of("causal_lm", rate=0.1), module_of("causal_lm", rate=0.1)
    fit(tmp_path, first, max_epochs=3, callbacks=[stop_after(tmp_path, stop)])
    trainer = fit(tmp_path, second, max_epochs=3, resume=tmp_path / "stopped.ckpt")
    assert trainer.global_step == 9
    assert second.losses == whole.losses[stop:]
    for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_other_steps_is_refused(tmp_path):
    fit(tmp_path, module_of("causal_lm"), callbacks=[stop_after(tmp_path, 1)])
    with pytest.raises(RunError, match="other steps"):
        fit(tmp_path, module_of("causal_lm"), resume=tmp_path / "stopped.ckpt", samples_per_step=4)


def test_accumulating_planned_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="several of them"):
        fit(tmp_path, module_of("causal_lm"), accumulate_grad_batches=2)
    assert len(LENGTHS) == 13


def test_bf16_holds_for_forward_passes(tmp_path):
    module = module_of("causal_lm")
    fit(tmp_path, module, precision="bf16-mixed")
    plan = module.data.plan(0)
    expected, _ = one_by_one("causal_lm", module.model, [module.samples[i] for i in plan.step_sample_ids(0)])
    assert 1e-6 < relative(module.found[0], expected) < 5e-2


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(tmp_path):
    run_two("tests.adapters.lightning_processes", tmp_path)
    alone = module_of("causal_lm", rate=0.1)
    fit(tmp_path, alone, max_epochs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found["losses"] == pytest.approx(alone.losses, rel=1e-5)
        assert len(found["gradients"]) == len(alone.found) == 6
        for a, b in zip(found["gradients"], alone.found, strict=True):
            assert relative(a, b) <= 1e-5  # the parameters move: the first is held to 1e-6
        assert relative(found["gradients"][0], alone.found[0]) <= 1e-6
