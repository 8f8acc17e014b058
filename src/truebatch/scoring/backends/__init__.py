"""What judges: transformers, HTTP, other processes, Ray, functions."""
