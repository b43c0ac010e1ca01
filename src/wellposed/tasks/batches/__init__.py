"""From examples to batches: blocks, grouping by length, padding."""
