"""The census of Hugging Face architectures, each in a process of its own."""
