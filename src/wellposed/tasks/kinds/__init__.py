"""Base classes of tasks: classification, language modelling, sequence to sequence, images."""
