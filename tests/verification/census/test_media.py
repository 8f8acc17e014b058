"""Recordings, images with texts and series: one tiny architecture of each kind is fed and judged."""

import pytest
import torch

from truebatch.testing.tiny_hf.media_samples import media_inputs
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.census.media import MEDIA_HEADS, examine_media
from truebatch.verification.census.runner import CensusConfig, census_tasks
from truebatch.verification.census.tables import TITLES, markdown


@pytest.mark.parametrize(
    ("head", "name", "used"),
    [
        ("image_and_text", "clip", "padded"),
        ("image_and_text", "siglip", "grouped"),  # it takes the last cell of a row, and no mask
        ("time_series", "patchtst", "grouped"),
        ("audio_classification", "whisper", "grouped"),
        ("speech_seq2seq", "whisper", "padded"),
    ],
)
def test_a_tiny_model_is_fed_and_judged(head, name, used):
    torch.set_num_threads(1)
    row = examine_media(tiny_model(name, head))
    assert row["chosen"] == used, row
    assert row["layouts"][used]["check"]["outputs"] < 1e-5
    assert row["leak"]["planted"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(("head", "name"), [("speech_ctc", "wav2vec2"), ("audio_language", "qwen3_asr")])
def test_a_recording_of_its_own_length_is_fed(head, name):
    model = tiny_model(name, head)
    samples = media_inputs(model, [3, 9]).samples
    lengths = {
        max(sample[key].shape) for sample in samples for key in ("input_values", "input_features") if key in sample
    }
    assert len(lengths) == 2 or head == "audio_language"
    assert examine_media(model)["verdict"] in ("fell back", "equal")


def test_a_planted_fault_is_seen():
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_model("clip", "image_and_text")
            self.config = self.model.config

        def forward(self, input_ids, pixel_values, attention_mask=None):
            out = self.model(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)
            return {"text_embeds": out.text_embeds - out.text_embeds.mean(0) / 2, "image_embeds": out.image_embeds}

    row = examine_media(Normalised())
    assert row["verdict"] == "refused", row
    assert row["layouts"]["padded"]["verdict"] == row["layouts"]["grouped"]["verdict"] == "different"


def test_what_cannot_be_fed_says_why():
    row = examine_media(tiny_model("llama"))
    assert row["verdict"] == "not fed"
    assert "among its arguments" in row["why"]


def test_the_new_heads_are_counted_and_have_a_table():
    tasks = census_tasks(CensusConfig(heads=MEDIA_HEADS))
    assert {task.head for task in tasks} >= {"speech_ctc", "speech_seq2seq", "image_and_text", "time_series"}
    rows = [
        {"model_type": "clip", "head": head, **examine_media(tiny_model("clip", "image_and_text"))}
        for head in MEDIA_HEADS[:1]
    ]
    facts = {"command": "truebatch census", "transformers": "5", "torch": "2", "hardware": "a core", "date": "today",
             "truebatch": "0", "python": "CPython", "dtype": "float32"}  # fmt: skip
    assert f"## {TITLES['speech_ctc']}" in markdown(facts, rows)
