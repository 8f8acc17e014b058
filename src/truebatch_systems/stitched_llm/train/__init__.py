"""Where the adapter starts, what is trained, and the Hugging Face Trainer."""
