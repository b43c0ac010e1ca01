"""What tasks of one kind share: classification, sequence to sequence, losses, generation."""
