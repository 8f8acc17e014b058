"""One micro-batch as tensors: fields, collate, segments, keyed randomness, losses in chunks."""
