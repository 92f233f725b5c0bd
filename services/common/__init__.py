"""What every service shares: errors, tokens, settings, logs, the object store."""
