"""Generation with prompts padded on the right is found and named as such; on the left it is right."""

import pytest
import torch
from torch import nn

from tests.hf.tiny_models import build
from tests.verification import planted as P
from truebatch.batch.fields import Field
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig

NAME = "right padding used for generation"
PAD = 0


def prompts(lengths=(3, 17, 9, 24, 5, 12), vocab=40):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab, (n,), generator=draw).tolist() for n in lengths]


def padded(chosen, side):
    width = max(map(len, chosen))
    rows = [torch.tensor(s) for s in chosen]
    pads = [torch.full((width - len(s),), PAD) for s in chosen]
    pairs = zip(rows, pads, strict=True)
    ids = torch.stack([torch.cat([r, p] if side == "right" else [p, r]) for r, p in pairs])
    real = torch.stack(
        [torch.cat([torch.ones(len(r)), torch.zeros(len(p))] if side == "right" else [torch.zeros(len(p)), torch.ones(len(r))])
         for r, p in zip(rows, pads, strict=True)]
    ).long()  # fmt: skip
    return ids, real


def hugging_face(architecture, side, *, as_text, new=6):
    model = build(architecture)

    def batched(chosen):
        ids, real = padded(chosen, side)
        made = model.generate(input_ids=ids, attention_mask=real, max_new_tokens=new, do_sample=False, pad_token_id=PAD)
        new_ids = made[:, ids.shape[1] :].tolist()
        return [" ".join(map(str, row)) for row in new_ids] if as_text else new_ids

    return batched


@pytest.mark.parametrize("as_text", [True, False], ids=["texts", "ids"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_function_that_pads_prompts_on_the_right_for_generate_is_named(architecture, as_text):
    report = verify(hugging_face(architecture, "right", as_text=as_text), samples=prompts())
    assert report.is_broken
    assert report.causes[0].name == NAME, str(report)


@pytest.mark.parametrize("as_text", [True, False], ids=["texts", "ids"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_function_that_pads_prompts_on_the_left_for_generate_is_right(architecture, as_text):
    report = verify(hugging_face(architecture, "left", as_text=as_text), samples=prompts())
    assert report.ok, str(report)


def test_the_original_function_beside_it_changes_nothing_in_the_name():
    right = hugging_face("llama", "right", as_text=True)
    report = verify(right, one=lambda prompt: right([prompt])[0], samples=prompts())
    assert report.causes[0].name == NAME, str(report)


class Greedy(nn.Module):
    """A model of one's own, with a loop of one's own over all cells again."""

    def __init__(self, side, new=5):
        super().__init__()
        self.side, self.new = side, new
        self.body = P.LanguageModel()

    def step(self, ids, real):
        positions = (real.cumsum(1) - 1).clamp(min=0)
        x = self.body.tok(ids) + self.body.pos(positions)
        T = ids.shape[1]
        may = real[:, None, None, :].bool() & torch.ones(T, T, dtype=torch.bool).tril()
        for layer in self.body.layers:
            x = layer(x, may | torch.eye(T, dtype=torch.bool))
        return self.body.head(x[:, -1])

    def forward(self, ids, real):
        return self.step(ids, real).argmax(-1)

    def generate(self, chosen):
        ids, real = padded(chosen, self.side)
        width = ids.shape[1]
        for _ in range(self.new):
            ids = torch.cat([ids, self(ids, real)[:, None]], 1)
            real = torch.cat([real, torch.ones(len(ids), 1, dtype=torch.long)], 1)
        return ids[:, width:]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_loop_of_ones_own_is_recognised_too(side):
    torch.manual_seed(0)
    model = Greedy(side)
    report = verify(lambda chosen: model.generate(chosen), samples=prompts())
    assert report.ok == (side == "left"), str(report)
    assert [c.name for c in report.causes] == ([] if side == "left" else [NAME])


def test_with_fields_the_side_is_named_and_the_left_one_is_right():
    model = build("llama")

    def function(batch):
        ids = batch["input_ids"]
        made = model.generate(
            input_ids=ids, attention_mask=batch.is_real.long(), max_new_tokens=5, do_sample=False, pad_token_id=PAD
        )
        return made[:, ids.shape[1] :]

    data = [{"input_ids": p} for p in prompts()]
    fields = (Field(name="input_ids"),)
    report = verify(function, samples=data, fields=fields, config=VerifyConfig(layout="padded"))
    assert report.causes[0].name == NAME, str(report)
    report = verify(function, samples=data, fields=fields, config=VerifyConfig(layout="left"))
    assert report.ok, str(report)


def test_padding_that_reaches_a_result_without_generation_keeps_its_own_name():
    model = build("llama")

    def last_logits(chosen):
        ids, real = padded(chosen, "right")
        return model(input_ids=ids, attention_mask=real).logits[:, -1]

    report = verify(last_logits, samples=prompts())
    assert report.is_broken
    assert report.causes[0].name == "padding reaches the result"
