"""Processors of model folders, loaded for images alone where there is nothing for videos."""

from __future__ import annotations

from truebatch.hf import processors
from truebatch.hf.processors import load_processor
from truebatch.testing.tiny_hf.processors import tiny_vlm_folder


def test_a_folder_without_settings_for_videos_loads_where_torchvision_is_installed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(processors, "find_spec", lambda _name: object())
    made = load_processor(tiny_vlm_folder(tmp_path / "qwen", "qwen2_vl"))
    assert type(made).__name__ == "Qwen2VLProcessor"
    assert made.image_processor is not None
