"""The hf room."""
