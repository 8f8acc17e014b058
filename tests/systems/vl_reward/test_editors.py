"""Pipelines of diffusers as editors: tiny ones with random weights, and arguments checked against their signatures."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from truebatch.cli.app import run
from truebatch.errors import ConfigError
from truebatch_systems.vl_reward.editors import DiffusersEditor, pipeline_arguments, pipeline_class

diffusers = pytest.importorskip("diffusers")
import transformers  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

SIZE = 32


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("StableDiffusionInstructPix2PixPipeline", {"image_guidance_scale": 1.5}, {"true_cfg_scale": 4.0}),
        ("StableDiffusion3Img2ImgPipeline", {"strength": 0.5}, {"image_guidance_scale": 1.5}),
        ("StableDiffusionXLImg2ImgPipeline", {"guidance_scale": 7.0}, {"true_cfg_scale": 4.0}),
        ("FluxKontextPipeline", {"guidance_scale": 3.5}, {"strength": 0.5}),
        ("QwenImageEditPipeline", {"true_cfg_scale": 4.0}, {"image_guidance_scale": 1.5}),
    ],
)
def test_settings_are_checked_against_the_pipeline(name, taken, refused):
    kind = getattr(diffusers, name)
    assert pipeline_arguments(kind, taken).items() >= taken.items()
    with pytest.raises(ConfigError, match="does not take these settings"):
        pipeline_arguments(kind, refused)


def test_a_scale_that_needs_a_negative_prompt_gets_one():
    assert pipeline_arguments(diffusers.QwenImageEditPipeline, {}) == {"negative_prompt": " "}
    assert pipeline_arguments(diffusers.QwenImageEditPipeline, {"negative_prompt": "noise"}) == {
        "negative_prompt": "noise"
    }
    assert pipeline_arguments(diffusers.FluxKontextPipeline, {}) == {}
    assert pipeline_arguments(diffusers.FluxKontextPipeline, {"true_cfg_scale": 2.0})["negative_prompt"] == " "


def test_a_pipeline_without_a_picture_is_refused():
    with pytest.raises(ConfigError, match="does not edit a picture"):
        pipeline_arguments(diffusers.FluxPipeline, {})


def clip_tokenizer(folder):
    """A CLIP tokenizer of single letters."""
    letters = [chr(code) for code in range(33, 127)]
    vocab = {word: at for at, word in enumerate([*letters, *(f"{one}</w>" for one in letters)])}
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    made = transformers.CLIPTokenizer(vocab_file=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt"))
    made.model_max_length = 77
    return made


def clip_text(kind, **more):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPTextConfig(
        **sizes, vocab_size=200, projection_dim=32, bos_token_id=188, eos_token_id=189, pad_token_id=1, **more
    )
    return kind(config).eval()


def vae(channels=4):
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64), in_channels=3, out_channels=3, latent_channels=channels, sample_size=SIZE,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=32,
        shift_factor=0.0, scaling_factor=1.0, use_quant_conv=channels == 4, use_post_quant_conv=channels == 4,
    )  # fmt: skip


def sdxl(folder):
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=SIZE, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
    )  # fmt: skip
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        unet=unet, vae=vae(), scheduler=diffusers.EulerDiscreteScheduler(),
        text_encoder=clip_text(transformers.CLIPTextModel),
        text_encoder_2=clip_text(transformers.CLIPTextModelWithProjection),
        tokenizer=clip_tokenizer(folder / "t1"), tokenizer_2=clip_tokenizer(folder / "t2"),
        requires_aesthetics_score=False, add_watermarker=False,
    )  # fmt: skip


def sd3(folder):
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=SIZE, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=64, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return diffusers.StableDiffusion3Img2ImgPipeline(
        transformer=transformer, vae=vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip_text(transformers.CLIPTextModelWithProjection), tokenizer=clip_tokenizer(folder / "t1"),
        text_encoder_2=clip_text(transformers.CLIPTextModelWithProjection), tokenizer_2=clip_tokenizer(folder / "t2"),
        text_encoder_3=t5(64), tokenizer_3=word_tokenizer(),
    )  # fmt: skip


def t5(width):
    config = transformers.T5Config(vocab_size=99, d_model=width, d_ff=37, d_kv=8, num_layers=1, num_heads=4)
    return transformers.T5EncoderModel(config).eval()


def word_tokenizer():
    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "</s>": 2, "blue": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=32
    )


def flux(folder):
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return diffusers.FluxImg2ImgPipeline(
        transformer=transformer, vae=vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip_text(transformers.CLIPTextModel), tokenizer=clip_tokenizer(folder / "t1"),
        text_encoder_2=t5(32), tokenizer_2=word_tokenizer(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (sdxl, {"strength": 0.5, "guidance_scale": 2.0}),
        (sd3, {"strength": 0.9, "height": 32, "width": 32}),
        (flux, {"strength": 0.9, "height": 32, "width": 32}),
    ],
)
def test_tiny_pipelines_edit_from_their_folders(make, given, tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "pipeline"
    made = make(tmp_path)
    made.save_pretrained(folder)
    kind = pipeline_class(folder, "diffusers:DiffusionPipeline")
    assert kind.__name__ == type(made).__name__
    call = pipeline_arguments(kind, {"num_inference_steps": 2, **given})
    editor = DiffusersEditor(str(folder), device="cpu", dtype="float32", params=call)
    editor.load()
    image = Image.new("RGB", (SIZE, SIZE), "red")
    first, second = (editor.edit(image, "make it blue", seed=3, name="a") for _ in range(2))
    assert first.size == (SIZE, SIZE)
    assert first.tobytes() == second.tobytes()
    assert first.tobytes() != editor.edit(image, "make it blue", seed=4, name="a").tobytes()
    editor.unload()


def test_a_setting_that_the_pipeline_does_not_take_is_said_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPipeline"}))
    command = [
        "--set",
        "diffusion_model.type=diffusers",
        "--set",
        f"diffusion_model.params.model_name={tmp_path / 'pipe'}",
    ]
    command += ["--set", "reward_model.type=tiny", "--set", "diffusion_model.params.image_guidance_scale=1.5"]
    assert run(["vl_reward", "run", *command, "--set", f"evaluation.output_dir={tmp_path / 'run'}"]) == 2
    assert "diffusion_model.params.image_guidance_scale" in capsys.readouterr().err
