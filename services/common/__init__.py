"""Code that all services share: errors, tokens, settings, logs, processes, the object store."""
