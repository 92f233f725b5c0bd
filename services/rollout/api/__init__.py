"""The part of the rollout package that other packages may import: wire models."""
