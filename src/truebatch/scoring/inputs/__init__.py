"""From data files to samples, images and prompts."""
