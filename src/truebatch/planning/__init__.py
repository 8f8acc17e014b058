"""Planning: measure samples, form steps, cut them into micro-batches. NumPy only."""
