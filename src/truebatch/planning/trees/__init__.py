"""Prompts and completions as trees, and the rows that hold them."""
