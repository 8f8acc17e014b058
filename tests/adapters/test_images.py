"""Trainers with images: what the collator gives is laid in rows, and an update is the gradient of its samples one by one."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Trainer

from tests.adapters.trainers import Gradients, PlannedTrainer, arguments, build, gradient_of, relative, trainer_of
from tests.hf.finetune.vision.folders import SIZES, llava_records, pictures
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.adapters.trainer import TruebatchMixin
from truebatch.errors import ConfigError, DataError
from truebatch.hf.processors import load_processor
from truebatch.io.images import rgb_image
from truebatch.testing.tiny_hf.processors import tiny_vlm_folder


def chats(folder):
    """Messages and images as datasets of the Hub have them."""
    from PIL import Image

    pictures(folder)
    out = []
    for record in llava_records(8):
        names = record.get("image", [])
        names = [names] if isinstance(names, str) else names
        asked, answer = (turn["value"].replace("<image>\n", "") for turn in record["conversations"])
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": asked}]
        said = [{"type": "text", "text": answer}]
        out.append(
            {
                "images": [rgb_image(Image.open(folder / name)) for name in names],
                "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": said}],
            }
        )
    assert len(SIZES) == 4
    return out


def collator_of(processor):
    """As the documentation of transformers writes one."""

    def collate(samples):
        texts = [processor.apply_chat_template(sample["messages"], tokenize=False) for sample in samples]
        images = [sample["images"] for sample in samples]
        given = {"images": images} if any(images) else {}
        made = processor(text=texts, **given, return_tensors="pt", padding=True, add_special_tokens=False)
        made["labels"] = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
        return made

    return collate


def one_by_one(model, samples, collate):
    model.zero_grad()
    inputs = [collate([sample]) for sample in samples]
    count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in inputs)
    for one in inputs:
        (model(**one).loss * int((one["labels"][:, 1:] != -100).sum()) / count).backward()
    return gradient_of(model)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_vl", "packed"),
        pytest.param("llava_next", "packed", marks=pytest.mark.slow),
        pytest.param("idefics3", "packed", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "padded", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_the_gradient_of_its_samples_with_images_one_by_one(tmp_path, name, layout):
    from transformers import AutoModelForImageTextToText

    folder = tiny_vlm_folder(tmp_path / name, name)
    model, collate = AutoModelForImageTextToText.from_pretrained(folder), collator_of(load_processor(folder))
    samples, kept = chats(tmp_path), Gradients()
    trainer = PlannedTrainer(
        model=model, train_dataset=samples, data_collator=collate, callbacks=[kept],
        truebatch=AdapterConfig(layout=layout, cells=512, check_samples=2),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.0), None),
        args=arguments(
            tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1,
            remove_unused_columns=False,
        ),
    )  # fmt: skip
    trainer.train()
    assert len(kept.found) == 1
    assert relative(kept.found[0], one_by_one(model, samples, collate)) <= 1e-6


@pytest.mark.slow
def test_trl_trains_with_images_on_planned_rows(tmp_path):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from transformers import AutoModelForImageTextToText

    class PlannedSFT(TruebatchMixin, trl.SFTTrainer):
        pass

    folder = tiny_vlm_folder(tmp_path / "llava", "llava")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), load_processor(folder)
    rows = [row for row in chats(tmp_path) if len(row["images"]) == 1]
    data = datasets.Dataset.from_list([{**row, "images": row["images"]} for row in rows])
    kept = Gradients()
    trainer = PlannedSFT(
        model=model, train_dataset=data, processing_class=processor, callbacks=[kept],
        truebatch=AdapterConfig(layout="packed", cells=512, check_samples=2),
        args=trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], save_strategy="no", max_grad_norm=0.0, use_cpu=True, bf16=False,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1, max_length=None,
            learning_rate=0.0, disable_tqdm=True, dataloader_pin_memory=False, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    trainer.train()
    expected = one_by_one(model, [trainer.train_dataset[i] for i in range(len(rows))], trainer.data_collator)
    assert relative(kept.found[0], expected) <= 1e-6


def test_a_first_step_without_a_label_is_named_and_a_later_one_is_logged(tmp_path, caplog):
    model, samples = build("causal_lm")
    mute = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in samples]
    with pytest.raises(DataError, match="all labels of its samples are -100"):
        trainer_of(tmp_path, model, mute, per_device_train_batch_size=13, num_train_epochs=1).train()
    mixed = [mute[5] if at == 5 else sample for at, sample in enumerate(samples)]
    with caplog.at_level(logging.WARNING):
        trainer_of(tmp_path, model, mixed, per_device_train_batch_size=1, num_train_epochs=1).train()
    assert "has nothing to learn from: samples" in caplog.text


def test_overlong_is_a_setting_of_the_adapter_where_the_error_names_it(tmp_path):
    model, samples = build("causal_lm")
    given = {"per_device_train_batch_size": 5, "num_train_epochs": 1}
    with pytest.raises(Exception, match="overlong='drop'"):
        trainer_of(tmp_path, model, samples, truebatch=AdapterConfig(cells=10), **given).train()
    for overlong, steps in (("drop", 2), ("cut", 3)):
        kept = Gradients()
        config = AdapterConfig(cells=10, overlong=overlong)
        trainer = trainer_of(tmp_path, model, samples, truebatch=config, callbacks=[kept], **given)
        trainer.train()
        assert len(kept.found) == trainer.state.global_step == steps
        short = [s for s in samples if len(s["input_ids"]) <= 10]
        if overlong == "drop":
            assert sum(len(ids) for ids in trainer._planned.plan(0).samples.dropped_ids.reshape(-1, 1)) == 13 - len(
                short
            )


def test_images_are_never_cut(tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = tiny_vlm_folder(tmp_path / "llava", "llava")
    model, collate = AutoModelForImageTextToText.from_pretrained(folder), collator_of(load_processor(folder))
    trainer = PlannedTrainer(
        model=model, train_dataset=chats(tmp_path), data_collator=collate,
        args=arguments(tmp_path, remove_unused_columns=False),
        truebatch=AdapterConfig(layout="packed", cells=512, overlong="cut"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="a cut could go through an image"):
        trainer.train()
    assert issubclass(PlannedTrainer, Trainer)
