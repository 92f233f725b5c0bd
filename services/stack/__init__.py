"""The local stack: Postgres, S3, the buffer service and the verifier on one machine."""
