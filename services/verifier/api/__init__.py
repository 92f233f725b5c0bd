"""What other packages may import of the verifier service: its client, wire models and formats."""
