"""The same loop over packed rows of at most 32 tokens."""

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

import truebatch as tb

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config, attn_implementation="truebatch")
samples = [{"input_ids": torch.randint(1, 64, (length,))} for length in (5, 9, 3, 12, 30, 4, 7, 7)]
sampler = tb.TokenBudgetSampler([len(sample["input_ids"]) for sample in samples], cells=32)
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=tb.collate_packed)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
cells = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cells += batch["input_ids"].numel()
print(f"{2 * sum(len(sample['input_ids']) for sample in samples) / cells:.0%} of the cells are tokens")
