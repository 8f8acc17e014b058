"""On made shapes: a tiny model that really looks, pruned to 30 % of its vision tokens, beside untrained ways to prune."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import truebatch
from truebatch.config.load import load_config
from truebatch.reports.artifacts import kept_findings
from truebatch.testing.toy_images import SHAPES
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch_systems.vlm_pruning.backbones.tiny import tiny_model
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples
from truebatch_systems.vlm_pruning.data.toy_shapes import CHANCE, EDGES
from truebatch_systems.vlm_pruning.eval.baselines import WAYS
from truebatch_systems.vlm_pruning.eval.evaluate import answer_samples, evaluate
from truebatch_systems.vlm_pruning.eval.plots import show
from truebatch_systems.vlm_pruning.eval.scorers import judge_of
from truebatch_systems.vlm_pruning.system import VLM_PRUNING
from truebatch_systems.vlm_pruning.train.pretrain import View, align_tower, make_patches, pretrain_tiny

STARTER = Path(truebatch.__file__).parent / "systems/vlm_pruning/starter/configs/vision_token_pruning.yaml.template"


def test_what_a_patch_shows_is_known_patch_by_patch():
    patches = make_patches(16)
    shapes, colours = patches.things
    assert patches.pixels.shape == (16, 3, 56, 56)
    assert ((shapes >= 0) == (colours >= 0)).all()
    assert (shapes >= 0).sum(1).tolist() == [6] * 16
    assert shapes.max() == len(SHAPES) - 1
    assert [int((patches.edges == edge).sum()) for edge in range(len(EDGES))] == [2, 2, 2, 2]


def test_patches_of_a_resized_picture_show_the_cell_in_their_middle():
    whole, small = (make_patches(8, view=View(grid=8, cell=14, side=side)) for side in (112, 56))
    assert whole.pixels.shape[-1] == 112
    assert small.things[0].shape == (8, 16)
    shapes = whole.things[0].view(8, 8, 8)
    assert (shapes >= 0).sum() == 6 * 8
    assert torch.equal(small.things[0].view(8, 4, 4), shapes[:, 1::2, 1::2])


def test_a_few_steps_bring_patches_nearer_to_their_words():
    before, after = (align_tower(tiny_model("tiny-llava"), images=64, steps=steps) for steps in (1, 40))
    assert after > before + 0.2


# ---- the whole way; minutes


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    torch.set_num_threads(2)
    return pretrain_tiny(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def pruned(backbone, tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "run"
    given = [f"backbone_settings.name={backbone}"]
    config_file = out.parent / "vision_token_pruning.yaml"
    config_file.write_text(STARTER.read_text(encoding="utf-8"), encoding="utf-8")
    config = load_config(settings_type(VLM_PRUNING), config_file, overrides=given)
    train_system(VLM_PRUNING, config, Start(out=out))
    return open_trained(out)


@pytest.mark.slow
@pytest.mark.xdist_group("vlm_pruning_quality")
def test_a_tiny_model_answers_nine_of_ten_questions_and_not_without_the_image(backbone, tmp_path):
    trained = open_trained(backbone.parent)
    dataset = trained.task.test()
    assert isinstance(dataset, EncodedSamples)
    assert evaluate(trained.config, trained.model, dataset, tmp_path)["origin"]["accuracy"] >= 0.9
    ground = Image.new("RGB", (56, 56), (122, 116, 104))
    blind = [{**sample, "image": ground} for sample in dataset.samples]
    said = answer_samples(trained.model, dataset.encoder, blind, mode="origin")
    judge = judge_of(blind)
    # Every question has each answer equally often: whoever does not see is right one time in four at most.
    assert sum(judge(one.text, sample) for one, sample in zip(said, blind, strict=True)) / len(blind) <= CHANCE


@pytest.mark.slow
@pytest.mark.xdist_group("vlm_pruning_quality")
def test_thirty_percent_of_the_tokens_lose_three_points_at_most_and_beat_untrained_ways(pruned, tmp_path):
    dataset = pruned.task.test()
    figures = evaluate(pruned.config, pruned.model, dataset, tmp_path)
    assert figures["hard"]["average_keep_ratio"] <= 0.30
    assert figures["points_lost"]["hard"] <= 3.0
    show(pruned.config, pruned.model, dataset, tmp_path)
    table = dict(kept_findings(tmp_path))["41-accuracy-by-budget"]
    shares = [float(name.removesuffix(" %")) / 100 for name in table.header[1:]]
    # Untrained ways get the next larger budget: they see more of every picture than the trained heads do.
    column = 1 + min(at for at, share in enumerate(shares) if share >= figures["hard"]["average_keep_ratio"])
    accuracy = {row[0]: float(row[column]) for row in table.rows}
    for way in WAYS:
        assert 100 * figures["hard"]["accuracy"] >= accuracy[way] + 5, accuracy
