"""What can be verified: models, functions, Hugging Face models, targets of the command line."""
