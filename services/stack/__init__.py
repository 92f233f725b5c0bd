"""The embedded stack: Postgres, S3 and the services on one machine, under one supervisor."""
