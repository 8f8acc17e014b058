"""A server with an OpenAI-compatible address as a backend: its address, requests and answers."""
