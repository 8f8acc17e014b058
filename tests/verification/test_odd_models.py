"""Right models of odd kinds raise no alarm in fp32."""

import pytest
import torch
from torch import nn

from tests.verification import planted as P
from tests.verification.faults.fault import IDS, samples
from tests.verification.right_models import MODELS
from truebatch.batch.fields import Field
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


class Facts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, batch):
        return self.head(batch["facts"])


class FactsBesideTheMean(Facts):
    def forward(self, batch):
        return super().forward(batch) - super().forward(batch).mean(0)


def tables():
    draw = torch.Generator().manual_seed(0)
    return [{"facts": torch.randn(4, generator=draw), "label": n % 3} for n in range(6)]


ONCE = (Field(name="facts", kind="once"), Field(name="label", kind="once"))


def test_samples_of_single_values_are_proven_without_padding():
    torch.manual_seed(0)
    assert verify(Facts(), P.Choice(), tables(), ONCE).ok
    mixed = verify(FactsBesideTheMean(), P.Choice(), tables(), ONCE)
    assert mixed.is_broken
    assert mixed.causes[0].name == "samples are mixed", str(mixed)


def test_lists_of_results_are_found_however_deep_they_lie():
    class Deep(P.Classifier):
        def forward(self, batch):
            x = self.hidden(batch)
            return {"cells": x, "more": (self.head(self.pool(x, batch)), batch.per_sample(x)), "name": "deep"}

    torch.manual_seed(0)
    report = verify(Deep(), samples=samples(), fields=P.CLASS_FIELDS)
    assert report.ok, str(report)
    assert not [r for r in report.results if r.verdict == "raised"], str(report)


def test_functions_over_images_of_one_channel_are_told_apart_by_their_size():
    torch.manual_seed(0)
    net = nn.Conv2d(1, 4, 3, padding=1)
    images = [torch.randn(1, height, width) for height, width in ((5, 7), (3, 3), (8, 4), (6, 6))]

    def padded(many):
        height, width = (max(x.shape[axis] for x in many) for axis in (1, 2))
        rows = [nn.functional.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in many]
        return net(torch.stack(rows)).amax((2, 3))

    assert verify(lambda many: [net(x).amax((1, 2)) for x in many], model=net, samples=images).ok
    assert verify(padded, one=lambda x: net(x).amax((1, 2)), samples=images).is_broken


def test_a_loss_over_padding_of_two_functions_is_no_average():
    torch.manual_seed(0)
    scores = nn.Linear(6, 8)
    recordings = [{"x": torch.randn(n, 6), "letters": torch.randint(1, 8, (n // 4,))} for n in (8, 21, 12, 5)]

    def asked(many, lengths):
        x = nn.utils.rnn.pad_sequence([s["x"] for s in many])
        letters = [s["letters"] for s in many]
        loss = nn.functional.ctc_loss(
            scores(x).log_softmax(-1), torch.cat(letters), lengths(x, many), [len(s) for s in letters], reduction="sum"
        )
        return {"loss_sum": loss, "count": len(many)}

    def own(x, many):
        return [len(s["x"]) for s in many]

    one = lambda sample: asked([sample], own)  # noqa: E731
    assert verify(lambda many: asked(many, own), one=one, samples=recordings).ok
    broken = verify(lambda many: asked(many, lambda x, some: [len(x)] * len(some)), one=one, samples=recordings)
    assert [cause.name for cause in broken.causes] == ["loss counts padding"], str(broken)
