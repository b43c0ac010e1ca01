"""``python -m wellposed`` runs the command of the lab, if that is installed."""

import sys

from wellposed.errors import extra_line

try:
    from wellposed_lab.cli.main import main
except ModuleNotFoundError as error:
    if error.name != "wellposed_lab":
        raise
    line = extra_line("lab")
    sys.exit(f"wellposed: the command is in the lab, which is not installed; run: {line}")

if __name__ == "__main__":
    sys.exit(main())
