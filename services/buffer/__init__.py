"""The buffer service: owns all state of a run. Others import `client` and nothing else."""
