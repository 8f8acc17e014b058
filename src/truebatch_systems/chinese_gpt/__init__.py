"""A small Chinese GPT, trained from scratch in true batches."""
