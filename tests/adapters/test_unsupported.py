"""What the mixin cannot obey is refused before training, in three parts, and named."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.training_args import OptimizerNames

from tests.adapters.trainers import PlannedTrainer, arguments, build, trainer_of
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.adapters.trainer import TruebatchMixin
from truebatch.errors import BatchError, ConfigError, DataError, LawError, TruebatchError

REFUSED = {
    "label_smoothing_factor": 0.1,
    "train_sampling_strategy": "group_by_length",
    "dataloader_drop_last": True,
    "auto_find_batch_size": True,
    "ignore_data_skip": True,
    "neftune_noise_alpha": 5.0,
    "bf16_full_eval": True,
    "optim": OptimizerNames.LOMO,
    "accelerator_config": {"split_batches": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_would_be_ignored_is_refused(tmp_path, name):
    model, samples = build("causal_lm")
    with pytest.raises(ConfigError) as error:
        PlannedTrainer(model=model, args=arguments(tmp_path, **{name: REFUSED[name]}), train_dataset=samples)
    assert name in error.value.seen
    assert error.value.do


def test_the_order_of_the_data_cannot_be_given_either(tmp_path):
    model, samples = build("causal_lm")
    with pytest.raises(ConfigError, match="two planners"):
        PlannedTrainer(
            model=model, args=arguments(tmp_path, train_sampling_strategy="sequential"), train_dataset=samples
        )


def test_a_loss_that_returns_means_is_refused_wherever_it_stands(tmp_path):
    model, samples = build("causal_lm")
    given = {"model": model, "args": arguments(tmp_path), "train_dataset": samples}

    class Below(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return super().compute_loss(model, inputs, **kwargs) * 2

    class Own(TruebatchMixin, Below):
        pass

    class Above(TruebatchMixin, Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return super().compute_loss(model, inputs, **kwargs) * 2

    class Step(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class OwnStep(TruebatchMixin, Step):
        pass

    for kind, word in ((Own, "compute_loss"), (Above, "compute_loss"), (OwnStep, "training_step")):
        with pytest.raises(ConfigError, match=f"a custom {word}"):
            kind(**given)
    with pytest.raises(ConfigError, match="loss function"):
        PlannedTrainer(**given, compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum())


def test_sharded_models_are_refused(tmp_path):
    model, samples = build("causal_lm")
    trainer = trainer_of(tmp_path, model, samples)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="sharded"):
        trainer.train()


def test_a_collator_with_a_generator_of_its_own_is_refused(tmp_path):
    class Seeded:
        seed = 3

        def __call__(self, features):
            return features[0]

    model, samples = build("causal_lm")
    with pytest.raises(ConfigError, match="its own generator"):
        PlannedTrainer(model=model, args=arguments(tmp_path), train_dataset=samples, data_collator=Seeded())


def test_streams_are_refused(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from build("causal_lm")[1]

    model, _ = build("causal_lm")
    with pytest.raises(DataError, match="length"):
        trainer_of(tmp_path, model, Stream(), max_steps=2).train()


def test_dropout_is_refused_until_it_is_allowed_by_name(tmp_path, caplog):
    model, samples = build("causal_lm")
    model.config.attention_dropout = 0.1
    with pytest.raises(LawError, match="dropout"):
        trainer_of(tmp_path, model, samples, max_steps=1).train()
    trainer_of(tmp_path, model, samples, max_steps=1, truebatch=AdapterConfig(allow=("dropout",))).train()
    assert "equal in distribution only, because dropout is allowed" in caplog.text


WRONG_SAMPLES = {
    "no input_ids to measure": lambda s: {"tokens": s["input_ids"]},
    "which the planned rows would not pass": lambda s: {**s, "position_ids": torch.arange(len(s["input_ids"]))},
    "has a gap between": lambda s: {
        **s,
        "attention_mask": torch.tensor([1, 0] + [1] * (len(s["input_ids"]) - 2)),
    },
    "has labels where": lambda s: {**s, "attention_mask": torch.tensor([0] + [1] * (len(s["input_ids"]) - 1))},
}


@pytest.mark.parametrize("words", WRONG_SAMPLES)
def test_samples_that_would_lose_something_are_refused(tmp_path, words):
    model, samples = build("causal_lm")
    wrong = [WRONG_SAMPLES[words](sample) for sample in samples]
    with pytest.raises((DataError, BatchError), match=words):
        trainer_of(tmp_path, model, wrong, max_steps=1, remove_unused_columns=False).train()


def test_every_refusal_has_three_parts(tmp_path):
    model, samples = build("causal_lm")
    with pytest.raises(TruebatchError) as error:
        PlannedTrainer(model=model, args=arguments(tmp_path, label_smoothing_factor=0.5), train_dataset=samples)
    assert str(error.value).count("\n") == 2
