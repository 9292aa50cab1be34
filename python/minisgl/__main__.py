"""`python -m minisgl`, and the `minisgl` command."""

import signal
import sys


def main() -> int:
    """Until the command line is loaded Ctrl-C ends the process at once; from then on `cli.main` answers it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minisgl import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
