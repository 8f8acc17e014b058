"""The heads of Hugging Face models: inputs, logits and exact losses."""
