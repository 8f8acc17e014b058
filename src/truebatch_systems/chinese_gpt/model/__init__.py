"""The model, its export and its generation."""
