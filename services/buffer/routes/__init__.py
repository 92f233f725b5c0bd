"""The routes of the buffer service. They only translate; the logic is in the modules above."""
