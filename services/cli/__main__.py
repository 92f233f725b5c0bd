"""`python -m services.cli` is the command `bapo`."""

from services.cli.main import main

main()
