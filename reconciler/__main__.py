"""`python -m reconciler` is the console script `job-reaper`."""

from reconciler.cli import main

if __name__ == "__main__":
    main()
