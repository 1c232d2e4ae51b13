"""`python -m nightshift …`, for a machine where the package is not installed but lies on PYTHONPATH."""

from nightshift.cli.app import main

if __name__ == "__main__":  # processes that the experts decide in import this module as well
    main()
