"""The Hugging Face Trainer with planned steps: the gradient of one by one, whatever the accumulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.adapters.trainers import (
    HEADS,
    LENGTHS,
    Gradients,
    PlannedTrainer,
    arguments,
    build,
    gradients,
    one_by_one,
    relative,
    sum_and_count,
    trainer_of,
)
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.adapters.trainer import TruebatchMixin
from truebatch.errors import BatchError, RunError
from truebatch.testing.failpoints import armed

PER_STEP = 8


def check_updates(folder, case, **given):
    found, steps, trainer = gradients(folder, case, num_train_epochs=1, **given)
    model, samples = build(case)
    assert sorted(i for ids in steps for i in ids) == list(range(len(LENGTHS)))
    assert len(found) == len(steps) == trainer.state.global_step
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for gradient, loss, ids in zip(found, logged, steps, strict=True):
        expected, true_loss = one_by_one(case, model, [samples[i] for i in ids])
        assert relative(gradient, expected) <= 1e-6
        assert loss == pytest.approx(true_loss, rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
@pytest.mark.parametrize("case", HEADS)
def test_every_update_is_the_gradient_of_its_samples_one_by_one(tmp_path, case, accumulation):
    check_updates(
        tmp_path,
        case,
        per_device_train_batch_size=PER_STEP // accumulation,
        gradient_accumulation_steps=accumulation,
    )


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_packed_rows_give_the_same_updates(tmp_path, accumulation):
    check_updates(
        tmp_path,
        "causal_lm",
        per_device_train_batch_size=PER_STEP // accumulation,
        gradient_accumulation_steps=accumulation,
        truebatch=AdapterConfig(layout="packed"),
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradient_checkpointing_gives_the_same_updates(tmp_path, layout):
    check_updates(
        tmp_path,
        "causal_lm",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        truebatch=AdapterConfig(layout=layout),
    )


@pytest.mark.parametrize("visit", [1, 2, 4, 5])
def test_memory_that_runs_out_anywhere_in_a_step_changes_only_the_cut(tmp_path, caplog, visit):
    """Also in a later item of the trainer's loop: what an earlier one has added to the gradient is not lost."""
    with armed(f"step.backward:oom:{visit}"):
        check_updates(tmp_path, "causal_lm", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert "ran out of memory" in caplog.text


def test_memory_that_runs_out_in_an_evaluation_changes_nothing(tmp_path):
    model, samples = build("causal_lm")
    expected = trainer_of(tmp_path, model, samples).evaluate(samples)["eval_loss"]
    with armed("step.validation:oom:1"):
        found = trainer_of(tmp_path, model, samples).evaluate(samples)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_budget_cuts_forward_passes_and_nothing_else(tmp_path):
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    whole, steps, _ = gradients(tmp_path, "causal_lm", **given)
    cut, same, trainer = gradients(tmp_path, "causal_lm", truebatch=AdapterConfig(cells=16), **given)
    assert [sorted(ids) for ids in steps] == [sorted(ids) for ids in same]
    assert max(len(trainer._planned.plan(0).step(k)[0]) for k in range(len(same))) > 2
    for a, b in zip(cut, whole, strict=True):
        assert relative(a, b) <= 1e-6


def test_the_trainer_alone_is_wrong_where_the_head_forgets_the_count(tmp_path):
    """What the mixin is for; when transformers repairs it, this test says so."""
    model, samples = build("token_classification")
    kept = Gradients()
    trainer_of(
        tmp_path,
        model,
        samples[:8],
        kind=Trainer,
        callbacks=[kept],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_steps=1,
    ).train()
    expected, _ = one_by_one("token_classification", model, samples[:8])
    assert float(kept.found[0].norm() / expected.norm()) > 2


class Noted(list):
    """A dataset that remembers which samples were read."""

    def __init__(self, samples):
        super().__init__(samples)
        self.read = []

    def __getitem__(self, at):
        self.read.append(at)
        return super().__getitem__(at)


def corrupt(features):
    """A collator with chance in it, from every global generator that collators use."""
    import random

    assert len(features) == 1
    ids = features[0]["input_ids"]
    is_changed = torch.rand(len(ids)) < 0.3
    other = torch.as_tensor(np.random.randint(5, 20, len(ids))) + random.randint(0, 3)
    return {"input_ids": torch.where(is_changed, other, ids)[None], "labels": ids[None]}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def run(folder, *, stop=None, resume=None, **given):
    model, samples = build("causal_lm")
    data = Noted(samples)
    trainer = PlannedTrainer(
        model=model,
        args=arguments(
            folder,
            **{
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 3,
                "num_train_epochs": 3,
                "save_strategy": "steps",
                "save_steps": 1,
                "learning_rate": 1e-2,
            }
            | given,
        ),
        train_dataset=data,
        data_collator=corrupt,
        callbacks=[StopAt(stop)] if stop else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, data


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer, _ = run(tmp_path_factory.mktemp("whole"))
    return trainer


@pytest.mark.parametrize(("stop", "workers"), [(2, 0), (5, 2), (7, 0), (11, 2)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, whole, stop, workers):
    run(tmp_path, stop=stop)
    trainer, _ = run(
        tmp_path, resume=str(tmp_path / f"checkpoint-{stop}"), save_strategy="no", dataloader_num_workers=workers
    )
    assert trainer.state.global_step == whole.state.global_step == 15
    for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (trainer, whole)]
    assert losses[0] == losses[1]


def test_resuming_reads_no_sample_of_the_steps_that_are_done(tmp_path):
    run(tmp_path, stop=4)
    trainer, data = run(tmp_path, resume=True, stop=5)
    plan = trainer._planned.plan(0)
    del data.read[: 1 + len(LENGTHS)]  # the first to find the head, then all to be measured
    assert sorted(data.read) == sorted(plan.step_sample_ids(4).tolist())


def test_a_checkpoint_of_other_steps_is_refused(tmp_path):
    run(tmp_path, stop=2)
    with pytest.raises(RunError, match="other steps") as error:
        run(tmp_path, resume=True, gradient_accumulation_steps=2)
    assert "samples_per_step=3 in the checkpoint, 2 now" in error.value.seen


@pytest.mark.parametrize("case", ["causal_lm", "token_classification", "t5"])
def test_the_evaluation_loss_is_that_of_all_samples_together(tmp_path, case):
    model, samples = build(case)
    trainer = trainer_of(tmp_path, model, samples, per_device_eval_batch_size=4)
    pairs = [sum_and_count(case, model, sample) for sample in samples]
    expected = sum(total for total, _ in pairs).item() / sum(count for _, count in pairs)
    assert trainer.evaluate(samples)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_own_metrics_keep_their_predictions_and_get_the_exact_loss(tmp_path):
    model, samples = build("sequence_classification")
    samples = [{**s, "input_ids": s["input_ids"][:3].repeat(2)} for s in samples if len(s["input_ids"]) >= 3]
    trainer = trainer_of(tmp_path, model, samples, per_device_eval_batch_size=4)
    trainer.compute_metrics = lambda seen: {"right": float((seen.predictions.argmax(-1) == seen.label_ids).mean())}
    figures = trainer.evaluate(samples)
    totals = [sum_and_count("sequence_classification", model, s)[0].item() for s in samples]
    assert figures["eval_loss"] == pytest.approx(np.mean(totals), rel=1e-5)
    assert 0 <= figures["eval_right"] <= 1


def test_padding_that_a_tokenizer_made_is_taken_off(tmp_path):
    model, samples = build("causal_lm")

    def pad(sample, at):
        n = len(sample["input_ids"])
        left = at % 3
        fill = [left, 16 - n - left]
        return {
            "input_ids": torch.nn.functional.pad(sample["input_ids"], fill, value=1),
            "labels": torch.nn.functional.pad(sample["labels"], fill, value=-100),
            "attention_mask": torch.nn.functional.pad(torch.ones(n, dtype=torch.int64), fill),
        }

    kept = Gradients()
    padded = [pad(sample, at) for at, sample in enumerate(samples)]
    given = {"per_device_train_batch_size": 8, "max_steps": 1}
    trainer = trainer_of(tmp_path, model, padded, callbacks=[kept], **given)
    trainer.train()
    ids = trainer._planned.plan(0).step_sample_ids(0)
    assert trainer._planned.measured.lengths.tolist() == LENGTHS
    assert relative(kept.found[0], one_by_one("causal_lm", model, [samples[i] for i in ids])[0]) <= 1e-6


def test_tokens_and_samples_are_counted_as_the_trainer_counts_them(tmp_path):
    model, samples = build("causal_lm")
    trainer = trainer_of(
        tmp_path,
        model,
        samples,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        include_num_input_tokens_seen="non_padding",
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 * sum(LENGTHS)
    assert trainer.num_examples(trainer.get_train_dataloader()) == len(LENGTHS)
    assert trainer.state.epoch == 2
    assert trainer.state.total_flos > 0


def test_a_loss_that_is_no_number_names_its_samples(tmp_path):
    model, samples = build("causal_lm")
    with torch.no_grad():
        model.lm_head.weight[7, 0] = float("nan")
    with pytest.raises(BatchError, match="is nan") as error:
        trainer_of(tmp_path, model, samples, per_device_train_batch_size=4).train()
    assert "samples [" in error.value.seen


def test_the_class_is_still_the_users_own(tmp_path):
    class Loud(Trainer):
        def log(self, logs, *args, **kwargs):
            super().log({**logs, "mine": 1}, *args, **kwargs)

    class Both(TruebatchMixin, Loud):
        pass

    model, samples = build("causal_lm")
    trainer = trainer_of(tmp_path, model, samples, kind=Both, per_device_train_batch_size=4, max_steps=2)
    trainer.train()
    assert all(entry["mine"] == 1 for entry in trainer.state.log_history)
