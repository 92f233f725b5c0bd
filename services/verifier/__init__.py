"""The verifier: an HTTP service that scores responses in a pool of killable processes."""
