"""The names of the note: both steps give the same, and its two errors say what they said."""

from __future__ import annotations

import copy

import pytest
import torch
from PIL import Image

from tests.systems.vlm_pruning.worlds import picture, samples
from truebatch.errors import ConfigError
from truebatch_systems.vlm_pruning.compat import (
    Backbone,
    register_multi_layer_hooks_batch,
    replace_vision_tokens_in_embeddings_batch,
    train_step,
    train_step_batch,
    train_step_fn,
    vision_intervals,
)
from truebatch_systems.vlm_pruning.model.model import Choosing

CONFIG = {
    "backbone_settings": {
        "name": "tiny-llava",
        "mllm_settings": {"enable_true_batch": True, "unified_image_size": 56, "image_max_size": 40},
    },
    "method_settings": {
        "pruning_layers": [1, 3],
        "pruner_d_internal": 16,
        "pruner_num_heads": 2,
        "disc_d_d": 16,
        "disc_target_layers": [-1, -2, -3],
        "use_token_num_target": False,
    },
}


def backbone(**mllm) -> Backbone:
    config = copy.deepcopy(CONFIG)
    config["backbone_settings"]["mllm_settings"] |= mllm
    return Backbone(config)


def test_both_steps_give_the_same_losses_gradients_and_statistics():
    owner = backbone()
    owner.model.train()
    batch = samples(4, images=1)
    info = {"backbone": owner, "global_batch_index": 1, "total_planned_batches": 10}
    found = []
    for step in (train_step, train_step_batch):
        owner.model.zero_grad()
        losses = step(batch, info)
        sum(losses["layer_pruners"].values()).backward()
        gradient = torch.cat([p.grad.flatten() for p in owner.model.pruners.parameters() if p.grad is not None])
        found.append((losses, gradient))
    (one, alone), (other, together) = found
    assert (alone - together).norm() <= 1e-4 * alone.norm()
    assert set(one) == {"discriminator", "token_merger", "layer_pruners", "metrics"}
    assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-4, abs=1e-6)
    assert one["metrics"]["vision_tokens_mean"] == one["metrics"]["vision_tokens_max"] == 16
    assert one["metrics"]["vision_tokens_min"] == 16


def test_the_step_is_chosen_by_the_switch_or_by_name():
    assert train_step_fn(CONFIG) is train_step_batch
    assert train_step_fn({"backbone_settings": {"mllm_settings": {"enable_true_batch": False}}}) is train_step
    assert train_step_fn({}) is train_step
    assert train_step_fn({**CONFIG, "trainer_settings": {"train_step_fn": train_step}}) is train_step


def test_images_get_one_size_with_the_switch_and_keep_their_aspect_without():
    assert backbone()._resize_image(picture(0, 60, 90)).size == (56, 56)
    assert backbone(enable_true_batch=False)._resize_image(picture(0, 60, 80)).size == (40, 30)
    unset = backbone(enable_true_batch=False, image_max_size=None)
    assert unset._resize_image(Image.new("RGB", (3000, 1000))).size == (1100, 367)
    assert unset._resize_image(Image.new("RGB", (300, 100))).size == (300, 100)


def test_a_batch_is_preprocessed_as_the_note_returns_it():
    owner = backbone()
    chosen = samples(3, images=1)
    asked = [[sample[key] for sample in chosen] for key in ("image", "question", "answer")]
    found = owner.preprocess_batch(*asked)
    T = found["embeddings"].shape[1]
    assert found["embeddings"].shape == (3, T, 64)
    assert found["raw_vision_features"].shape == (3, 16, 32)
    assert found["vision_token_positions"].eq(found["vision_positions"]).all()
    assert (found["vision_token_positions"][:, 1] - found["vision_token_positions"][:, 0] + 1).tolist() == [16] * 3
    assert (found["answer_token_positions"] < 0).all()
    assert found["attention_mask"].shape == (3, T)


def test_the_two_errors_of_the_note():
    with pytest.raises(ValueError, match="preprocess_batch requires enable_true_batch=True"):
        backbone(enable_true_batch=False).preprocess_batch([picture(0)], ["What?"])
    with pytest.raises(ValueError, match="Vision token positions not aligned across batch"):
        vision_intervals(torch.tensor([[False, True, True], [True, True, False]]))


def test_unknown_keys_are_refused_by_name():
    with pytest.raises(ConfigError, match="unified_image_sizes"):
        backbone(unified_image_sizes=3)


@torch.no_grad()
def test_hooks_prune_the_backbones_own_forward_as_the_model_does():
    owner = backbone()
    model = owner.model.eval()
    chosen = samples(3, images=1)
    batch = owner.batch_of(chosen)
    stream = model.look(batch)
    expected = model.pruned(stream, Choosing(how="soft", temperature=0.7))
    positions = vision_intervals(batch["is_vision"])
    question = stream.question.take(stream.embeds)
    hooks = register_multi_layer_hooks_batch(
        model, positions, question, stream.question.is_real, batch.is_real, temperature=0.7
    )
    with hooks as masks:
        text = model.backbone.model.language_model
        found = text(inputs_embeds=stream.embeds, attention_mask=batch.is_real.long(), use_cache=False)
    assert set(masks) == {1, 3}
    assert (found.last_hidden_state - expected.final)[batch.is_real].abs().max() <= 1e-4
    again = text(inputs_embeds=stream.embeds, attention_mask=batch.is_real.long(), use_cache=False)
    assert (again.last_hidden_state - model.unpruned(stream).final)[batch.is_real].abs().max() <= 1e-4


def test_vision_tokens_can_be_replaced_by_fewer():
    embeddings, mask = torch.randn(2, 10, 4), torch.ones(2, 10, dtype=torch.long)
    positions = torch.tensor([[2, 6], [2, 6]])
    new, moved, ones = replace_vision_tokens_in_embeddings_batch(embeddings, positions, torch.zeros(2, 3, 4), mask)
    assert new.shape == (2, 8, 4)
    assert moved.tolist() == [[2, 4], [2, 4]]
    assert torch.equal(new[:, 5:], embeddings[:, 7:])
    assert ones.shape == (2, 8)
