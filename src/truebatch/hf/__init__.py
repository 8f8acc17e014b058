"""Hugging Face models: loading, packed attention, heads, generation, fine-tuning."""
