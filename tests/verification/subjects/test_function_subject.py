"""Two functions of the user, one over a sample and one over a list of samples, in the forms people write them."""

import copy

import pytest
import torch
from torch import nn

from tests.verification import planted as P
from tests.verification.test_faults import samples
from truebatch.batch.fields import Field
from truebatch.errors import BatchError, ConfigError
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig


def words(dropout=0.0):
    """A bag of words over lists of ids: right for one sample and for several."""
    model = nn.ModuleDict({"embed": nn.Embedding(50, 8), "off": nn.Dropout(dropout), "head": nn.Linear(8, 3)})

    def one(sample):
        return model["head"](model["off"](model["embed"](torch.tensor(sample)).sum(0)))

    return model, one, lambda chosen: torch.stack([one(s) for s in chosen])


LISTS = [[7, 8, 9], [1, 2, 3, 4, 5, 6], [4], [9, 3], [5, 5, 5, 2, 1]]

FORMS = {
    "a number": lambda y: float(y.detach().sum()),
    "a list of numbers": lambda y: y.detach().tolist(),
    "a NumPy array": lambda y: y.detach().numpy(),
    "a tensor of no axes": lambda y: y.sum(),
    "a named tensor of no axes": lambda y: {"score": y.sum()},
    "a complex tensor": lambda y: torch.complex(y, y),
    "two tensors": lambda y: (y, y / 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_form_a_result_has_right_is_equal_and_wrong_is_noticed(form):
    torch.manual_seed(0)
    model, one, batched = words()
    shaped = FORMS[form]

    def wrong(chosen):
        return [shaped(y * (1 + 0.1 * (len(chosen) > 1))) for y in batched(chosen)]

    assert verify(
        lambda c: [shaped(y) for y in batched(c)], one=lambda s: shaped(one(s)), samples=LISTS, model=model
    ).ok
    report = verify(wrong, one=lambda s: shaped(one(s)), samples=LISTS, model=model)
    assert report.is_broken
    assert report.results[0].verdict == "equal"


def test_complex_numbers_may_be_rounded_as_real_ones_may():
    torch.manual_seed(0)
    model, one, batched = words()

    def rounded(chosen):
        y = batched(chosen) * (1 + 5e-7 * (len(chosen) > 1))
        return torch.complex(y, y)

    assert verify(rounded, one=lambda s: torch.complex(one(s), one(s)), samples=LISTS, model=model).ok


@pytest.mark.parametrize("shaped", [lambda y: {"score": y[..., 0]}, lambda y: y[..., 0]], ids=["named", "bare"])
def test_one_number_a_sample_is_an_output_and_not_a_loss(shaped):
    torch.manual_seed(0)
    model, one, batched = words()
    assert verify(lambda c: shaped(batched(c)), one=lambda s: shaped(one(s)), samples=LISTS, model=model).ok
    report = verify(lambda c: shaped(batched(c) * len(c)), one=lambda s: shaped(one(s)), samples=LISTS, model=model)
    assert report.is_broken


def test_lists_with_an_entry_a_sample_may_have_names():
    def mirrored(sample):
        return {"ids": sample[::-1]}

    def together(chosen):
        return {"ids": [s[::-1] for s in chosen]}

    def rotten(chosen):
        return {"ids": [s[::-1] if len(s) > 1 or len(chosen) == 1 else [0] for s in chosen]}

    assert verify(together, one=mirrored, samples=LISTS).ok
    assert verify(rotten, one=mirrored, samples=LISTS).is_broken


def test_a_tuple_of_as_many_outputs_as_there_are_samples_is_no_list_of_samples():
    torch.manual_seed(0)
    model, one, batched = words()
    both = verify(
        lambda c: (batched(c), batched(c) / 2), one=lambda s: (one(s), one(s) / 2), samples=LISTS, model=model
    )
    assert both.ok, str(both)

    class Two(P.LanguageModel):
        def forward(self, batch):
            y = super().forward(batch)
            return y, y / 2

    report = verify(Two(), samples=samples(), fields=(Field(name="input_ids"),))
    assert report.ok, str(report)


def test_dropout_is_off_for_the_original_function_too():
    torch.manual_seed(0)
    model, one, batched = words(dropout=0.5)
    assert verify(batched, one=one, samples=LISTS, model=model.train()).ok


def test_samples_stay_as_they_were_when_a_function_pads_them_in_place():
    torch.manual_seed(0)
    model, one, batched = words()
    data = copy.deepcopy(LISTS)

    def pads(chosen):
        found = batched(chosen)
        for sample in chosen:
            sample += [0] * (max(map(len, chosen)) - len(sample))
        return found

    assert verify(pads, one=one, samples=data, model=model).ok
    assert data == LISTS


def test_a_loss_may_be_a_plain_number():
    assert verify(
        lambda c: {"loss": sum(map(len, c)) / len(c)}, one=lambda s: {"loss": float(len(s))}, samples=LISTS
    ).ok


def test_a_layout_that_a_function_over_lists_cannot_be_asked_for_proves_nothing():
    torch.manual_seed(0)
    model, one, batched = words()
    report = verify(batched, one=one, samples=LISTS, model=model, config=VerifyConfig(layout="packed"))
    assert not report.ok
    assert "no arrangement was run" in report.unproven


def test_results_without_a_common_name_prove_nothing():
    torch.manual_seed(0)
    model, one, batched = words()
    report = verify(lambda c: {"a": batched(c)}, one=lambda s: {"b": one(s)[0]}, samples=LISTS, model=model)
    assert not report.ok
    assert "nothing could be compared" in report.unproven
    report = verify(lambda c: {"a": batched(c)}, one=lambda s: {"b": one(s)}, samples=LISTS, model=model)
    assert not report.ok
    assert "output.b alone, but output.a together" in report.results[0].error


def test_what_a_users_function_raises_for_one_sample_is_told_as_theirs():
    def mine(chosen):
        raise KeyError("mine")

    with pytest.raises(BatchError, match=r"cannot be run alone[\s\S]*KeyError: 'mine'"):
        verify(mine, samples=LISTS)


def bags(dtype=torch.float32, *, gradient_fault=0.0, written_dtype=None):
    """A padded bag of words with a loss; the fault is in the gradient alone."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 8), "head": nn.Linear(8, 3)}).to(dtype)

    def batched(chosen):
        width = max(map(len, chosen))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in chosen])
        real = torch.arange(width) < torch.tensor([len(s) for s in chosen])[:, None]
        bag = (model["embed"](ids) * real[..., None]).sum(1)
        y = model["head"](bag if written_dtype is None else bag.to(written_dtype))
        total = model["head"].weight.float().sum()
        return {
            "y": y,
            "loss": y.float().square().mean() + gradient_fault * (len(chosen) > 1) * (total - total.detach()),
        }

    return model, batched


def test_a_small_fault_in_the_gradient_of_a_function_is_not_taken_for_rounding():
    assert verify(bags()[1], samples=LISTS).ok
    report = verify(bags(gradient_fault=1e-4)[1], samples=LISTS)
    assert report.is_broken
    assert not report.results[0].is_over("outputs")


def test_a_function_in_half_precision_is_measured_against_fp32():
    model, batched = bags(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    report = verify(batched, samples=LISTS)
    assert report.ok, str(report)
    assert report.limits["gradient"] < 0.1
    assert all(torch.equal(v, before[k]) and v.dtype == torch.bfloat16 for k, v in model.state_dict().items())
    assert verify(bags(torch.bfloat16, gradient_fault=0.5)[1], samples=LISTS).is_broken


def test_a_function_with_half_precision_written_into_it_needs_a_tolerance():
    _, batched = bags(torch.bfloat16, written_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cannot be run in fp32[\s\S]*give a tolerance"):
        verify(batched, samples=LISTS)
    assert verify(batched, samples=LISTS, config=VerifyConfig(tolerance=0.05)).ok


def test_the_model_of_a_function_can_be_named_without_an_original_too():
    model, batched = bags()
    hidden = {"f": batched}
    assert all(d.part != "gradient" for d in verify(lambda c: hidden["f"](c), samples=LISTS).results[0].differences)
    report = verify(lambda c: hidden["f"](c), samples=LISTS, model=model)
    assert {d.part for d in report.results[0].differences} == {"outputs", "loss", "gradient"}


def test_the_sample_that_raises_alone_is_named():
    def picky(chosen):
        return [torch.tensor(s).float()[1:].max() for s in chosen]

    with pytest.raises(BatchError, match=r"sample 2 \(length 1\) cannot be run alone"):
        verify(picky, samples=LISTS)


def test_tokens_kept_after_the_end_of_a_text_are_named():
    end, following = 7, torch.randint(0, 12, (64,), generator=torch.Generator().manual_seed(0)).tolist()

    def continued(rows, cut):
        rows, found = [list(row) for row in rows], [[] for _ in rows]
        while not all(end in new for new in found) and len(found[0]) < 24:
            for row, new in zip(rows, found, strict=True):
                new.append(following[(row[-1] + 5 * len(row)) % 64])
                row.append(new[-1])
        return [new[: new.index(end) + 1] if cut and end in new else new for new in found]

    def one(row):
        return {"tokens": torch.tensor(continued([row], cut=True)[0])}

    def batched(rows, cut):
        return {"tokens": [torch.tensor(new) for new in continued(rows, cut)]}

    given = [[1, 2, 3], [4, 5, 6, 8, 9], [9], [3, 4], [5] * 9, [6, 1]]
    report = verify(lambda rows: batched(rows, False), one=one, samples=given)
    assert [cause.name for cause in report.causes] == ["kept after the end"], str(report)
    assert verify(lambda rows: batched(rows, True), one=one, samples=given).ok
