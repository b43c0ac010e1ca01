"""The tables and figures of five papers, and studies of ours, as recipes of `wellposed reproduce`.

Importing `wellposed_studies.papers` registers them; the entry point of this package does.
"""
