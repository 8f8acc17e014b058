"""Training speed on variable-length data, by method."""
