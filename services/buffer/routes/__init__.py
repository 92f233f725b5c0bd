"""The routes of the buffer service. They translate; the work is in the modules beside them."""
