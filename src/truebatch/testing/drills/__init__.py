"""Small runs that are killed, or run out of memory, and must recover."""
