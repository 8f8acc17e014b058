"""Under the Hugging Face Trainer: the same gradient however a step is cut, the note's face, adapter-only checkpoints."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from tests.adapters.trainers import Gradients, arguments
from tests.systems.stitched_llm.conftest import SMALL
from tests.systems.stitched_llm.test_training import run
from tests.systems.stitched_llm.tiny_donors import llama, make_ids, qwen2
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.errors import ConfigError
from truebatch.language.translate import in_chinese
from truebatch_systems.stitched_llm import StitchedModel, load_stitched
from truebatch_systems.stitched_llm.compat import NoteTraining, precision_of, starting_lines, training_arguments
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch
from truebatch_systems.stitched_llm.train.hf_trainer import StitchedTrainer

pytestmark = pytest.mark.xdist_group("stitched_donors")
LENGTHS = (5, 60, 12, 33, 7, 20, 48, 9)


def pad_batch(samples):
    width = max(len(s["input_ids"]) for s in samples)
    fill = {"input_ids": 0, "labels": -100}
    out = {
        name: torch.stack([torch.nn.functional.pad(s[name], (0, width - len(s[name])), value=pad) for s in samples])
        for name, pad in fill.items()
    }
    out["attention_mask"] = torch.stack([(torch.arange(width) < len(s["input_ids"])).long() for s in samples])
    return out


def one_update(tmp_path, kind, batch, *, collator, **extra):
    """The gradient and logged loss of one update over all eight samples."""
    model = stitch(llama(), qwen2(), Cut(bottom=2, top=2))
    kept = Gradients()
    data = [{"input_ids": ids, "labels": ids} for ids in make_ids(LENGTHS)]
    trainer = kind(
        model=model,
        args=arguments(
            tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch, num_train_epochs=1
        ),
        train_dataset=data,
        data_collator=collator,
        optimizers=(torch.optim.SGD(model.adapter.parameters(), lr=0.0), None),
        callbacks=[kept],
        **extra,
    )
    trainer.train()
    (gradient,) = kept.found
    return gradient, trainer.state.log_history[0]["loss"]


def single(samples):
    return {name: value[None] for name, value in samples[0].items()}


@pytest.mark.parametrize("way", ["plain Trainer", "planned, padded", "planned, packed"])
def test_every_cut_of_a_step_has_one_gradient_and_one_loss_under_the_trainer(tmp_path, way):
    reference = stitch(llama(), qwen2(), Cut(bottom=2, top=2))
    own = run(reference, lengths=LENGTHS, batch_size=8, learning_rate=0.0, max_steps=1, max_grad_norm=None)
    wanted = torch.cat([p.grad.flatten() for p in reference.adapter.parameters()]).double()
    for batch in (1, 2, 4, 8):
        if way == "plain Trainer":
            gradient, loss = one_update(tmp_path, Trainer, batch, collator=pad_batch)
        else:
            layout = AdapterConfig(layout=way.rpartition(" ")[2])
            gradient, loss = one_update(tmp_path, StitchedTrainer, batch, collator=single, truebatch=layout)
        gradient = gradient[gradient != 0]
        assert float((gradient - wanted).norm() / wanted.norm()) <= 1e-5
        assert abs(loss - own.records[-1]["loss"]) <= 5e-5 + 1e-6  # the Trainer logs four decimals


def test_train_keeps_its_meaning_in_pytorch_and_trains_with_a_folder(cached, tmp_path, capsys):
    model = StitchedModel.from_donors(**SMALL)
    assert model.train() is model
    assert model.training
    assert not model.bottom.training
    assert not model.train(False).training
    assert not model.eval().training
    before = model.adapter.linear.weight.detach().clone()
    given = {"learning_rate": 1e-3, "save_steps": 3, "logging_steps": 2, "dataloader_num_workers": 0}
    model.train(output_dir=tmp_path / "out", max_steps=6, per_device_train_batch_size=8, **given)
    assert not torch.equal(before, model.adapter.linear.weight)
    printed = capsys.readouterr().out
    assert "✅ effective batch_size: 8 × 4 (gradient_accumulation) = 32" in printed
    loaded = load_stitched(tmp_path / "out")
    assert torch.equal(loaded.adapter.linear.weight, model.adapter.linear.weight)
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoint-3").glob("*.safetensors")) == ["adapter.safetensors"]
    resumed = StitchedModel.from_donors(**SMALL)
    (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "moved")
    resumed.train(
        output_dir=tmp_path / "out", max_steps=6, per_device_train_batch_size=8, resume_from_checkpoint=True, **given
    )
    assert torch.equal(resumed.adapter.linear.weight, model.adapter.linear.weight)


def test_the_three_lines_say_what_the_settings_say():
    assert [in_chinese(line) for line in starting_lines(NoteTraining(), "fp16")] == [
        "✅ 有效batch_size: 1 × 4 (gradient_accumulation) = 4",
        "✅ 数据加载: 4个worker并行加载，每个预取2个batch",
        "✅ 混合精度: FP16 (Tesla T4优化)",
    ]
    assert starting_lines(NoteTraining(), "fp16") == [
        "✅ effective batch_size: 1 × 4 (gradient_accumulation) = 4",
        "✅ data loading: 4 workers in parallel, each prefetching 2 batches",
        "✅ mixed precision: FP16 (for a Tesla T4)",
    ]
    assert [in_chinese(line) for line in starting_lines(NoteTraining(dataloader_num_workers=0), "fp32")][1:] == [
        "✅ 数据加载: 主进程加载",
        "✅ 混合精度: 关闭 (FP32)",
    ]


def test_the_notes_settings_reach_the_trainer(tmp_path):
    asked = NoteTraining(dataloader_num_workers=2, gradient_checkpointing=True, save_steps=7)
    found = training_arguments(tmp_path, asked, "fp32")
    assert (found.dataloader_num_workers, found.dataloader_prefetch_factor) == (2, 2)
    assert (found.save_steps, found.logging_steps, found.learning_rate) == (7, 10, 1e-4)
    assert (found.gradient_accumulation_steps, found.max_grad_norm, found.gradient_checkpointing) == (4, 1.0, True)
    assert (
        training_arguments(tmp_path, NoteTraining(dataloader_num_workers=0), "fp32").dataloader_prefetch_factor is None
    )


def test_the_arguments_of_the_original_script_and_others_of_transformers_are_taken(tmp_path):
    asked = NoteTraining.named(
        {"fp16": True, "weight_decay": 0.1, "warmup_steps": 5, "lr_scheduler_type": "cosine", "adam_beta2": 0.98}
    )
    found = training_arguments(tmp_path, asked, "fp32")
    assert (found.weight_decay, found.warmup_steps, found.adam_beta2) == (0.1, 5, 0.98)
    assert found.lr_scheduler_type == "cosine"
    assert [precision_of(asked, "fp32", has_gpu=gpu) for gpu in (True, False)] == ["fp16", "fp32"]
    assert precision_of(NoteTraining(bf16=True), "fp32", has_gpu=False) == "bf16"
    assert "fp16=True needs a GPU" in starting_lines(asked, "fp32")[2]
    with pytest.raises(ConfigError, match="no setting 'weight_deca'; did you mean 'weight_decay'"):
        NoteTraining.named({"weight_deca": 0.1})
    with pytest.raises(ConfigError, match="remove_unused_columns is settled here"):
        NoteTraining.named({"remove_unused_columns": True})
    with pytest.raises(ConfigError, match="one precision at a time"):
        NoteTraining.named({"fp16": True, "bf16": True})


def test_bf16_asked_for_stores_the_donors_so_and_trains(cached, tmp_path):
    model = StitchedModel.from_donors(**SMALL)
    model.train(output_dir=tmp_path, bf16=True, weight_decay=0.1, max_steps=2, warmup_steps=1, dataloader_num_workers=0)
    assert next(model.top.parameters()).dtype == torch.bfloat16
    assert model.adapter.linear.weight.dtype == torch.float32


def test_a_setting_that_is_not_known_is_refused_with_the_nearest_name(cached, tmp_path):
    model = StitchedModel.from_donors(**SMALL)
    with pytest.raises(ConfigError, match=r"no setting 'learning_rat'.*learning_rate"):
        model.train(output_dir=tmp_path, learning_rat=1e-4)
    with pytest.raises(ConfigError, match="needs a folder"):
        model.train(learning_rate=1e-4)
    with pytest.raises(ConfigError, match="no setting 'cut_botom'"):
        StitchedModel.from_donors(cut_botom=2)


def test_donors_of_other_words_are_refused_or_matched_by_text(cached, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from truebatch_systems.stitched_llm.data.toy_corpus import END, UNKNOWN, words

    other = AutoModelForCausalLM.from_pretrained(cached / "top")
    order = [END, UNKNOWN, *reversed(words()[2:])]
    places = torch.tensor([words().index(word) for word in order])
    with torch.no_grad():  # the same top donor with its words in another order
        other.lm_head.weight.copy_(other.lm_head.weight[places].clone())
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight[places].clone())
    other.save_pretrained(tmp_path / "other")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(order)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, unk_token=UNKNOWN).save_pretrained(
        tmp_path / "other"
    )
    given = {"data": cached / "train.jsonl", "start": "identity"}
    with pytest.raises(ConfigError, match=r"(?s)do not speak the same vocabulary.*tokens differ"):
        StitchedModel.from_donors(cached / "bottom", tmp_path / "other", **given)
    plain = StitchedModel.from_donors(cached / "bottom", cached / "top", **given)
    matched = StitchedModel.from_donors(cached / "bottom", tmp_path / "other", vocabulary="by_text", **given)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, matched(input_ids=ids).logits, atol=1e-5)
