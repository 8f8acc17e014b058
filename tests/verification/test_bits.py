"""`verify` to the last bit: right models pass, what does not repeat itself is named, and what has no gradient is refused."""

import json

import pytest
import torch
from torch import nn

from tests.tiny import SETS_FIELDS, TEXT_FIELDS, NextToken, SetRisk, SetsModel, TextModel, set_samples, text_samples
from truebatch.cli.app import run
from truebatch.errors import ConfigError, LawError
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig

TEXTS = text_samples([3, 31, 8, 17, 4, 29, 12, 5])
SETS = set_samples([[2, 5, 1], [1], [7, 3, 9, 2], [4, 4], [25, 1], [3]])
BITS = VerifyConfig(exactness="bits")


def text_model(kind=TextModel):
    torch.manual_seed(0)
    return kind()


def test_models_of_ones_own_are_equal_to_the_last_bit():
    report = verify(text_model(), NextToken(), TEXTS, TEXT_FIELDS, config=BITS)
    assert (report.verdict, len(report.results)) == ("equal", 16)
    assert str(report).startswith("EQUAL TO THE LAST BIT: loss and gradients of a step, under 16 cuts")
    torch.manual_seed(0)
    assert verify(SetsModel(), SetRisk(), SETS, SETS_FIELDS, config=VerifyConfig(exactness="bits", layout="right")).ok


def test_a_model_is_left_as_it_was():
    model = text_model().eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify(model, NextToken(), TEXTS, TEXT_FIELDS, config=BITS)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_does_not_repeat_itself_is_named():
    class Restless(TextModel):
        calls = 0

        def forward(self, batch):
            self.calls += 1
            return super().forward(batch) * (1 + self.calls * 1e-6)

    report = verify(text_model(Restless), NextToken(), TEXTS, TEXT_FIELDS, config=BITS)
    assert report.verdict == "broken"
    assert "gradient not equal in tok.weight" in str(report)


def test_an_operation_without_a_deterministic_kernel_is_named():
    class Forbidden(TextModel):
        def forward(self, batch):
            if torch.are_deterministic_algorithms_enabled():
                raise RuntimeError("put_ does not have a deterministic implementation, but you set ...")
            return super().forward(batch)

    report = verify(text_model(Forbidden), NextToken(), TEXTS, TEXT_FIELDS, config=BITS)
    assert report.verdict == "broken"
    assert "put_ has no kernel that gives the same bits twice" in str(report)


def test_what_training_refuses_is_refused():
    class Normed(TextModel):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

    with pytest.raises(LawError, match="norm"):
        verify(text_model(Normed), NextToken(), TEXTS, TEXT_FIELDS, config=BITS)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tolerance": 1e-3}, "tolerance=0.001"),
        ({"layout": "left"}, "layout='left'"),
        ({"longest": 99}, "longest=99"),
        ({"exactness": "bit"}, "use 'rounding' or 'bits'"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        VerifyConfig(**{"exactness": "bits", **given})


def test_a_function_and_two_engines_are_refused():
    model = text_model()
    with pytest.raises(ConfigError, match="this is a function"):
        verify(lambda batch: model(batch), samples=TEXTS, fields=TEXT_FIELDS, config=BITS)
    with pytest.raises(ConfigError, match="your one-sample function"):
        verify(lambda many: many, one=lambda x: x, samples=TEXTS, config=BITS)
    with pytest.raises(ConfigError, match="two engines"):
        verify(model, NextToken(), TEXTS, TEXT_FIELDS, against="bfloat16", config=BITS)
    with pytest.raises(ConfigError, match="no parameter of this model is trained"):
        verify(model.requires_grad_(False), NextToken(), TEXTS, TEXT_FIELDS, config=BITS)


def test_the_command_takes_a_model_folder_and_keeps_its_result(tmp_path, capsys):
    tiny_model("bert", "sequence_classification").save_pretrained(tmp_path / "bert")
    assert run(["verify", str(tmp_path / "bert"), "--exactness", "bits", "--out", str(tmp_path / "kept")]) == 0
    shown = capsys.readouterr().out
    assert "under 8 cuts; 1 layout(s) are refused" in shown
    kept = json.loads((tmp_path / "kept" / "verification.json").read_text())
    assert (kept["exactness"], kept["verdict"]) == ("bits", "equal")
    assert run(["verify", str(tmp_path / "bert"), "--exactness", "bit"]) == 2
    assert run(["verify", str(tmp_path / "bert"), "--exactness", "bits", "--tolerance", "1e-3"]) == 2
    assert run(["verify", str(tmp_path / "bert"), "--exactness", "bits", "--against", "compile"]) == 2
