"""A loop over padded batches of a fixed number of samples."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config)
samples = [{"input_ids": torch.randint(1, 64, (length,))} for length in (5, 9, 3, 12, 30, 4, 7, 7)]


def collate(samples):
    rows = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": rows.masked_fill(rows == 0, -100)}


loader = DataLoader(samples, batch_size=4, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
cells = 0
for _ in range(2):
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cells += batch["input_ids"].numel()
print(f"{2 * sum(len(sample['input_ids']) for sample in samples) / cells:.0%} of the cells are tokens")
