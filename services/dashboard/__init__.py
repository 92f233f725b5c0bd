"""The dashboard: static files, which the buffer service serves."""
