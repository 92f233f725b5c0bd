"""The processes of a run: buffer service, verifier, rollout, trainer, and the local stack."""
