"""Public part of the buffer service: its client, its wire models and its file format."""
