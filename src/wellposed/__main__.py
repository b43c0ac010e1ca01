"""``python -m wellposed``: the command, where the script is not on the path."""

import sys

from wellposed_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
