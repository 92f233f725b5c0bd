"""What other packages may import of the rollout replicas: its client, wire models and formats."""
