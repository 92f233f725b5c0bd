"""The verifier: scores responses in killable processes. Others import `client` and nothing else."""
