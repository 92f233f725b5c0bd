"""The dashboard: static files that the buffer service serves."""
