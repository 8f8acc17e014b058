"""A group of answers to each prompt, GRPO's loss in a loop of one's own: prompts are laid out once."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import truebatch as tb

WORDS, END = 30, 2
torch.manual_seed(0)
policy = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=END, pad_token_id=0,
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
prompts = [torch.randint(3, WORDS, (n,)).tolist() for n in (40, 25)]


def sample(prompt: list[int], number: int) -> list[list[int]]:
    """Answers of up to 8 words."""
    ids = torch.tensor([prompt] * number)
    with torch.no_grad():
        found = policy.generate(input_ids=ids, do_sample=True, max_new_tokens=8)[:, len(prompt) :].tolist()
    return [one[: one.index(END) + 1] if END in one else one for one in found]


def reward(answer: list[int]) -> float:
    """How often word 7 is said."""
    return answer.count(7) / len(answer)


means = []
for _ in range(12):
    asked, answers, advantages = [], [], []
    for prompt in prompts:
        group = sample(prompt, 8)
        rewards = torch.tensor([reward(answer) for answer in group])
        means.append(float(rewards.mean()))
        asked += [prompt] * 8
        answers += group
        advantages.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
    found = tb.logprobs(policy, asked, answers)
    tokens = sum(map(len, answers))
    loss = -(torch.cat(advantages) * found.sums).sum() / tokens  # a sum and a count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(f"cells: {found.cells} instead of {found.copied_cells}")
print(f"reward: {sum(means[:4]) / 4:.2f} -> {sum(means[-4:]) / 4:.2f}")
