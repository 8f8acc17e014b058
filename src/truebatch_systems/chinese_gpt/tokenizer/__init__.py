"""Words of Chinese text and their ids."""
