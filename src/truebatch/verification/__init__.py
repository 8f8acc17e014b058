"""Is a batch equal to one sample at a time? `verify`, and the census of architectures."""
