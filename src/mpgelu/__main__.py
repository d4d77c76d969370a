"""``python -m mpgelu``: the command line."""

from mpgelu.cli import main

if __name__ == "__main__":
    main()
