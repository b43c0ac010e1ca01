"""Tables and figures of five papers, and our own studies, as recipes of `wellposed reproduce`."""
