"""Property tests are limited by examples, not by the clock of a shared machine."""

from hypothesis import settings

settings.register_profile("core", deadline=None, max_examples=100)
settings.load_profile("core")
