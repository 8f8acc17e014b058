"""Right models of odd kinds raise no alarm in fp32."""

import pytest
import torch

from tests.verification.faults.fault import IDS, samples
from tests.verification.right_models import MODELS
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig


def test_there_are_many():
    assert len(MODELS) >= 25


@pytest.mark.parametrize("name", MODELS)
def test_a_right_model_of_an_odd_kind_raises_no_alarm(name):
    build, layout = MODELS[name]
    torch.manual_seed(0)
    report = verify(build(), samples=samples(), fields=IDS, config=VerifyConfig(layout=layout))
    assert report.ok, str(report)
    assert not [r for r in report.results if r.verdict == "raised"], str(report)
