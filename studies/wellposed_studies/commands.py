"""The commands that the studies add to ``wellposed``."""

from wellposed_lab.cli.commands import COMMANDS, Command

COMMANDS.register("reproduce")(
    Command(
        "make a table or figure of a paper again: CSV, SVG, paper says / we got",
        "wellposed_studies.reproduce_command",
    )
)
