"""What other packages may import of the buffer service: its client, wire models and formats."""
