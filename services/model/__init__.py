"""Models that bapo can build itself."""
