"""TRL's DPOTrainer with one more class before it: beginnings that rows share are computed once, padding never."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from truebatch.adapters.trl import SharedPromptMixin

TEXT = "<unk> <pad> <eos> what is the colour of grass sky and snow green blue white red"
WORDS = TEXT.split()


class MyTrainer(SharedPromptMixin, DPOTrainer):
    """As before."""


def tiny_model() -> LlamaForCausalLM:
    """Random weights, always the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes, **ids))


inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
question = "what is the colour of grass and what is the colour of snow and what is the colour of "
pairs = [
    {"prompt": question + "sky", "chosen": "blue and white", "rejected": "red"},
    {"prompt": question + "grass", "chosen": "green", "rejected": "red and blue"},
]

with tempfile.TemporaryDirectory() as folder:
    trainer = MyTrainer(
        model=tiny_model(),
        ref_model=tiny_model(),
        args=DPOConfig(
            output_dir=folder, per_device_train_batch_size=2, max_steps=10, learning_rate=1e-2, logging_steps=1,
            report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, save_strategy="no",
        ),
        train_dataset=Dataset.from_list(pairs * 2),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()

losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
