"""The part of the verifier that other packages may import: its client and wire models."""
