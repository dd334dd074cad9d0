"""`python -m catenary`."""

from catenary.command_line import main

if __name__ == "__main__":
    main()
