"""The buffer service, which owns all state of a run. Other packages import its `api` folder only."""
