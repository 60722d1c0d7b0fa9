"""`python -m fedbicross`: the command line of a checkout that is not installed."""

from fedbicross.cli import main

if __name__ == "__main__":
    main()
