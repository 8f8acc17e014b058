"""The operations of a forward pass, watched beside those of a sample alone: where a result first goes wrong."""
