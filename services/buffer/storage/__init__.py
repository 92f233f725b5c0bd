"""The database schema and the object store, and what reads and writes them in bulk."""
