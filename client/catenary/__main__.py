"""The entry point of `python -m catenary`, which is the command `catenary`."""

from catenary.command_line import main

if __name__ == "__main__":
    main()
