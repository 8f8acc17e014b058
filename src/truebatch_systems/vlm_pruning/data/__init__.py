"""Records, datasets, made-up shapes, images and their sizes."""
