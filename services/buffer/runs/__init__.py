"""Runs, their attempts and replicas, stored configurations, and access to them."""
