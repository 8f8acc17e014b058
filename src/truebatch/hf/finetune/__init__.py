"""Train a Hugging Face model of the user's own on data of the user's own: `truebatch train hf`."""
