"""`bapo`, the command line: one module a command."""
