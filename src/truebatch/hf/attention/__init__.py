"""Packed attention, masks and positions for Hugging Face models."""
