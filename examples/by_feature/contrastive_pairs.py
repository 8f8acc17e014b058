"""Embeddings of texts: a question, its answer and wrong answers of its own (`nested`), one softmax for each question.

Negatives belong to the sample. Those taken from the rest of a batch make a loss of neighbours: another training for
every batch size, which `verify` reports.
"""

import torch
from torch import nn
from torch.nn import functional as F

import truebatch as tb

draw = torch.Generator().manual_seed(0)


def text(length):
    return torch.randint(1, 50, (length,), generator=draw)


SIZES = ((3, (5, 9, 2)), (9, (4, 6)), (2, (7, 1, 3, 8)), (12, (6, 6)), (5, (2, 11, 4)), (7, (3, 10)))
samples = [{"question": text(n), "answers": [text(m) for m in sizes]} for n, sizes in SIZES]  # the first one is right
fields = [
    tb.Field(name="question"),
    tb.Field(name="answers", kind="nested", axis="choices", inner="words"),
]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 16)

    def encode(self, ids, is_real):
        mean = (self.words(ids) * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True)
        return F.normalize(self.out(mean), dim=-1)

    def forward(self, batch):
        """The likeness of each answer to the question, one list for each sample."""
        words, choices = batch.rows("words"), batch.rows("choices")
        answers = batch.per_sample(choices.put_tokens(self.encode(batch["answers"], words.is_real)), "choices")
        asked = [self.words(ids).mean(0) for ids in batch.per_sample(batch["question"])]
        asked = F.normalize(self.out(torch.stack(asked)), dim=-1)
        return [one @ question / 0.1 for one, question in zip(answers, asked, strict=True)]


class RightAnswer:
    def counts(self, batch):
        return {"nll": batch.num_samples}

    def sums(self, model, batch):
        return {"nll": -torch.stack([scores.log_softmax(-1)[0] for scores in model(batch)]).sum()}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Encoder(), RightAnswer(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    print(tb.train(Encoder(), RightAnswer(), data, tb.TrainConfig(samples_per_step=3)).records[-1]["loss"])
