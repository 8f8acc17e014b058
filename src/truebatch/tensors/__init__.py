"""The tensors room."""
