"""What a description costs, worked out without running it."""
