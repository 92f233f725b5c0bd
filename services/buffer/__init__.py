"""The buffer service, which owns all state of a run. Others import its `api` folder only."""
