"""vLLM as a rollout engine: its process, its HTTP API, and how weights get into it."""
