"""The local stack: Postgres, S3, the buffer service and the verifier on one machine."""

DEFAULT_PORT = 8700
"""Port of the buffer service's REST API."""
