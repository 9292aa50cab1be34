"""Entry point of `python -m minisgl.shell`, an alias of `minisgl serve --shell`."""

import sys

from minisgl.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", "--shell", *sys.argv[1:]]))
