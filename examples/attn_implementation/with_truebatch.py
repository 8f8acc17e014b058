"""Several samples in one row, each as if it were alone: one import and one word."""

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

import truebatch  # noqa: F401

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config, attn_implementation="truebatch")
samples = [{"input_ids": torch.randint(64, (length,)).tolist()} for length in (5, 9, 3, 12)]
collator = DataCollatorWithFlattening(return_tensors="pt")
row = next(iter(DataLoader(samples, batch_size=4, collate_fn=collator)))

packed = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits[0]
alone = torch.cat([model(torch.tensor([sample["input_ids"]])).logits[0] for sample in samples])
error = ((packed - alone).norm() / alone.norm()).item()
print(f"relative error of a row against one sample at a time: {error:.1e}")
