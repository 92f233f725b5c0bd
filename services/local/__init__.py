"""The whole system on one machine: the same services, on a real Postgres and a real S3 server."""
