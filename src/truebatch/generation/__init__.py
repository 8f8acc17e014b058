"""Text from a model, token by token, for many prompts at once: what one prompt gets never depends on the others."""
