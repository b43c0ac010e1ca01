"""``python -m wellposed`` runs the command of the lab, if that is installed."""

import sys

try:
    from wellposed_lab.cli.main import main
except ModuleNotFoundError as error:
    if error.name != "wellposed_lab":
        raise
    sys.exit(
        "wellposed: the command is in the lab, which is not installed; run: pip install 'wellposed[lab]'"
    )

if __name__ == "__main__":
    sys.exit(main())
