"""TRL's SFTTrainer with planned steps; skipped where trl is not installed (the extra `bench`)."""

from __future__ import annotations

import pytest
import torch

from tests.adapters.trainers import Gradients, build, one_by_one, relative, sum_and_count
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.adapters.trainer import TruebatchMixin
from truebatch.errors import ConfigError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WORDS = [
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
    "h",
    "i",
    "j",
    "k",
    "l",
    "m",
    "n",
    "o",
    "p",
    "q",
    "r",
    "s",
    "t",
    "u",
    "v",
    "w",
    "x",
    "y",
    "z",
]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate(["<unk>", "<pad>", "<eos>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def pairs(number=13):
    draw = torch.Generator().manual_seed(0)

    def text(most):
        return " ".join(
            WORDS[int(i)]
            for i in torch.randint(0, 26, (1 + int(torch.randint(0, most, (), generator=draw)),), generator=draw)
        )

    return datasets.Dataset.from_list([{"prompt": text(6) + " ", "completion": text(9)} for _ in range(number)])


def sft(folder, *, truebatch=None, callbacks=(), **given):
    class Planned(TruebatchMixin, trl.SFTTrainer):
        pass

    model, _ = build("causal_lm")
    settings = {
        "output_dir": str(folder),
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "num_train_epochs": 1,
        "completion_only_loss": True,
    }
    return Planned(
        model=model,
        args=trl.SFTConfig(**(settings | given)),
        train_dataset=pairs(),
        eval_dataset=pairs(),
        processing_class=tokenizer(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.0), None),
        callbacks=list(callbacks),
        truebatch=truebatch,
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_update_is_the_gradient_of_its_samples_one_by_one(tmp_path, layout, accumulation):
    kept = Gradients()
    trainer = sft(
        tmp_path,
        truebatch=AdapterConfig(layout=layout),
        callbacks=[kept],
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    plan = trainer._planned.plan(0)
    samples = [{k: torch.as_tensor(s[k]) for k in ("input_ids", "labels")} for s in trainer.train_dataset]
    assert any((s["labels"] == -100).any() for s in samples)  # the loss is on the completions only
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(kept.found) == plan.num_steps == 2
    for k, gradient in enumerate(kept.found):
        step = [samples[i] for i in plan.step_sample_ids(k)]
        expected, loss = one_by_one("causal_lm", trainer.model, step)
        assert relative(gradient, expected) <= 1e-6
        assert logged[k] == pytest.approx(loss, rel=1e-5)


def test_the_evaluation_loss_is_that_of_all_samples_together(tmp_path):
    trainer = sft(tmp_path, per_device_eval_batch_size=4)
    found = trainer.evaluate()["eval_loss"]
    samples = [{k: torch.as_tensor(s[k]) for k in ("input_ids", "labels")} for s in trainer.eval_dataset]
    parts = [sum_and_count("causal_lm", trainer.model, s) for s in samples]
    assert found == pytest.approx(sum(t for t, _ in parts).item() / sum(n for _, n in parts), rel=1e-5)


@pytest.mark.parametrize(
    "given", [{"padding_free": True, "max_length": None}, {"loss_type": "dft"}, {"packing": True, "max_length": 32}]
)
def test_its_own_packing_and_other_losses_are_refused(tmp_path, given):
    with pytest.raises(ConfigError):
        sft(tmp_path, **given)
