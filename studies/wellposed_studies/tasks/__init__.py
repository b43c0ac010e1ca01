"""Tasks that only the papers need: the Long Range Arena, dialogue, and rows that ask for places."""
