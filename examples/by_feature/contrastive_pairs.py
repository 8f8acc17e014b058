"""Embeddings of texts: a question, its answer and wrong answers of its own (`nested`), beside the answers of all others.

Negatives from other samples couple the step: the loss is declared so, and is then that of the whole step, however it is
cut. Taken over each micro-batch instead, it would be another training for every batch size.
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

    def forward(self, ids, is_real):
        mean = (self.words(ids) * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True)
        return F.normalize(self.out(mean), dim=-1)


class RightAnswer(tb.CoupledObjective):
    def counts(self, batch):
        return {"nll": batch.num_samples}

    def embed(self, model, batch):  # what the loss needs of each sample: one question, a list of answers
        words, choices = batch.rows("words"), batch.rows("choices")
        answers = choices.put_tokens(model(batch["answers"], words.is_real))
        asked = [model(ids[None], torch.ones(1, len(ids)))[0] for ids in batch.per_sample(batch["question"])]
        return {"questions": torch.stack(asked), "answers": batch.per_sample(answers, "choices")}

    def loss(self, found):  # once, over all samples of the step and of all ranks
        answers = torch.cat(found["answers"])
        right = torch.tensor([0, *(len(one) for one in found["answers"][:-1])]).cumsum(0)  # the first of each
        return {"nll": F.cross_entropy(found["questions"] @ answers.T / 0.1, right, reduction="sum")}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(tb.assert_batchable(Encoder(), RightAnswer(), samples, fields))
    data = tb.TrainData(samples=samples, fields=fields)
    config = tb.TrainConfig(samples_per_step=6, batch_size=2)
    print(tb.train(Encoder(), RightAnswer(), data, config).records[-1]["loss"])
