"""Any Hugging Face architecture made tiny, with random weights and samples."""
