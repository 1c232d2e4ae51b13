"""`python -m nightshift …`, for a machine where the package is not installed but lies on PYTHONPATH."""

from nightshift.cli.app import main

main()
