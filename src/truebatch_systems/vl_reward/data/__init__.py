"""The benchmark file, prompts and made-up pictures."""
