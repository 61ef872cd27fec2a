"""What a run leaves behind: checkpoints and captures, read one weight at a time."""
