"""The Trainer adapter on a CUDA device: fp32, bf16 and fp16 with loss scaling, padded and packed."""

from __future__ import annotations

import pytest
import torch

from tests.adapters.trainers import Gradients, build, one_by_one, relative, trainer_of
from truebatch.adapters.planned_batches import AdapterConfig

pytestmark = pytest.mark.gpu


def first_update(folder, layout, **given):
    model, samples = build("causal_lm")
    kept = Gradients()
    trainer = trainer_of(
        folder,
        model,
        samples,
        callbacks=[kept],
        truebatch=AdapterConfig(layout=layout),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        use_cpu=False,
        **given,
    )
    trainer.train()
    return kept.found[0].cpu(), trainer, samples


def reference(trainer, samples):
    model, _ = build("causal_lm")
    ids = trainer._planned.plan(0).step_sample_ids(0)
    return one_by_one("causal_lm", model, [samples[i] for i in ids])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_fp32_is_the_gradient_of_one_by_one(tmp_path, layout):
    found, trainer, samples = first_update(tmp_path, layout)
    assert next(trainer.model.parameters()).is_cuda
    assert relative(found, reference(trainer, samples)[0]) <= 1e-5


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_no_further_from_fp32_than_twice_one_by_one(tmp_path, layout, precision):
    found, trainer, samples = first_update(tmp_path, layout, **{precision: True})
    expected, loss = reference(trainer, samples)
    model, _ = build("causal_lm")
    model.cuda()
    ids = trainer._planned.plan(0).step_sample_ids(0)
    with torch.autocast("cuda", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        alone, _ = one_by_one("causal_lm", model, [{k: v.cuda() for k, v in samples[i].items()} for i in ids])
    assert relative(found, expected) <= 2 * relative(alone.cpu(), expected)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=2e-2)
