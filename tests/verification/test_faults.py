"""Every planted fault is found and named; right models raise no alarm."""

import numpy as np
import pytest
import torch

from tests.verification import planted as P
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig

LENGTHS = [3, 17, 9, 24, 5, 12]


def samples(seed=0):
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(1, 40, n), "label": int(n % 3)} for n in LENGTHS]


def check(model, objective=None, layout="used"):
    torch.manual_seed(0)
    model = model()
    is_classifier = isinstance(model, P.Classifier)
    objective = objective or (P.Choice if is_classifier else P.NextToken)
    fields = P.CLASS_FIELDS if is_classifier else P.FIELDS
    return verify(model, objective(), samples(), fields, config=VerifyConfig(layout=layout))


FAULTS = {
    "mask ignored": (P.MaskIgnored, None, "later tokens are seen"),
    "mask ignored, causal": (P.MaskIgnoredButCausal, None, "packed samples see each other"),
    "wrong polarity": (P.WrongPolarity, None, "mask in the wrong polarity"),
    "2-D mask": (P.TwoDimensionalMask, None, "2-D mask passed to decoder layers"),
    "positions from padding": (P.PositionsFromPadding, None, "positions do not restart"),
    "row 0": (P.RowZeroSpan, None, "row 0 stands for the whole micro-batch"),
    "zeros on error": (P.ZerosOnError, None, "exception swallowed"),
    "recurrent": (P.Recurrent, None, "state runs across packed samples"),
    "convolution": (P.CausalConvolution, None, "state runs across packed samples"),
    "mean over padding": (P.MeanOverPadding, None, "a mean over padding"),
    "mean over width": (P.MeanOverWidth, None, "a mean over padding"),
    "last cell": (P.LastCell, None, "the last cell of a row is read"),
    "first cell": (P.FirstCell, None, "the first cell of a row is read"),
    "batch norm": (P.WithBatchNorm, None, "batch statistics"),
    "centred over the batch": (P.Centred, None, "samples are mixed"),
    "NaN in padding": (P.NanInPadding, None, "NaN in micro-batches only"),
    "average of averages": (P.LanguageModel, P.AverageOfAverages, "loss averaged per micro-batch"),
    "counts padding": (P.LanguageModel, P.CountsPadding, "loss counts padding"),
    "sums padding": (P.LanguageModel, P.SumsPadding, "loss counts padding"),
}


LEFT = {"first cell": "padded"}
"""Right unless padding comes first, which nobody meets who does not ask for it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault):
    model, objective, cause = FAULTS[fault]
    report = check(model, objective, LEFT.get(fault, "used"))
    print(report)
    assert not report.ok
    assert [c.name for c in report.causes][:1] == [cause]


def test_a_right_model_is_proven():
    report = check(P.LanguageModel)
    print(report)
    assert report.ok
