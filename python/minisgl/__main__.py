"""Entry point of `python -m minisgl` and of the `minisgl` command."""

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code. Ctrl-C ends the process at once while modules load."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minisgl import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
