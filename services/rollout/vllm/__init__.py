"""vLLM as a rollout engine: its process, its HTTP API, and loading weights into it."""
