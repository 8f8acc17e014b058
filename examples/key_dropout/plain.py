"""The gradient of one step of a BERT classifier with dropout, cut in two ways: two different gradients."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import truebatch as tb
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective

torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = BertForSequenceClassification(config).train()
head = head_of(model)
samples = [head.prepare({"input_ids": torch.randint(64, (n,)), "labels": n % 2}) for n in (5, 9, 3, 12)]

gradients = []
for most in (1, 4):
    plan = tb.build_plan([5, 9, 3, 12], tb.PlanConfig(samples_per_step=4, samples=most))
    for step in tb.load_steps(plan, samples, head.fields):
        model.zero_grad()
        tb.step_loss(model, HeadObjective(head=head), step, check_samples=0).backward()
    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
difference = ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()
print(f"relative difference of the gradients: {difference:.1e}")
