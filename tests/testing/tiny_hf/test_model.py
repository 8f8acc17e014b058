"""Tiny models: small, repeatable, finite, and made so that a leak would be seen."""

import pytest
import torch

from tests.hf.attention.cuts import alone_outputs
from truebatch.errors import ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.testing.tiny_hf.model import tiny_model, tiny_types
from truebatch.testing.tiny_hf.random_samples import make_samples

MIXED = {
    "gemma3_text": {"sliding_attention", "full_attention"},
    "qwen3_next": {"linear_attention", "full_attention"},
    "jamba": {"mamba", "linear_attention", "attention", "full_attention"},
}


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "mixtral", "deepseek_v3", "falcon_h1", "bloom", "xlnet"])
def test_a_tiny_model_is_small_in_fp32_and_evaluation_mode(model_type):
    model = tiny_model(model_type)
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not model.training


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_one_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = tiny_model("llama", seed=1), tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("model_type", MIXED)
def test_layers_of_every_kind_are_kept(model_type):
    config = tiny_model(model_type).config
    kinds = set(getattr(config, "layer_types", None) or config.layers_block_type)
    assert len(kinds) == 2
    assert kinds <= MIXED[model_type]


def test_a_window_is_small_enough_to_matter():
    assert tiny_model("mistral").config.sliding_window == 8


@pytest.mark.parametrize(
    "case", [("llama", "causal_lm"), ("bert", "masked_lm"), ("t5", "seq2seq"), ("mamba", "causal_lm")]
)
def test_what_a_cell_gives_depends_on_its_context(case):
    """If the neighbour's tokens came in, outputs would move by much more than rounding does."""
    model = tiny_model(*case)
    head, samples = head_of(model), make_samples(model, [12])
    changed = [{**samples[0], "input_ids": samples[0]["input_ids"].clone()}]
    changed[0]["input_ids"][0] = samples[0]["input_ids"][1]
    before, after = alone_outputs(model, head, samples)[0], alone_outputs(model, head, changed)[0]
    assert float((before - after)[-1].abs().max() / before.abs().max()) > 1e-3


def test_the_tables_list_many_architectures_for_every_head():
    assert len(tiny_types("causal_lm")) >= 140
    assert sum(len(tiny_types(head)) for head in ("encoder", "seq2seq", "vision_language")) >= 60
    assert "t5" in tiny_types("encoder")
    assert "bart" not in tiny_types("encoder")


def test_what_cannot_be_built_has_a_named_reason():
    with pytest.raises(ConfigError, match="use one of tiny_types"):
        tiny_model("no_such_architecture")
    with pytest.raises(ConfigError, match="unknown head"):
        tiny_model("llama", "juggling")
    with pytest.raises(ConfigError, match="cannot be built tiny") as caught:
        tiny_model("gemma4_assistant")
    assert "Error: " in caught.value.seen, "the reason says what was raised"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("heads", "at_least"), [(("causal_lm",), 140), (("masked_lm", "encoder", "seq2seq", "vision_language"), 150)]
)
def test_most_architectures_build_and_run(heads, at_least):
    ran, failed = [], []
    for head in heads:
        for model_type in tiny_types(head):
            try:
                model = tiny_model(model_type, head)
                alone = alone_outputs(model, head_of(model), make_samples(model, [5, 13]))
            except Exception as error:  # foreign code: whatever it raises is the reason
                failed.append(f"{head} {model_type}: {type(error).__name__} {error}")
                continue
            if all(bool(torch.isfinite(x).all()) for x in alone):
                ran.append((head, model_type))
    assert len(ran) >= at_least, "\n".join(failed)
