"""The objective, and choices of batch size and layout."""
