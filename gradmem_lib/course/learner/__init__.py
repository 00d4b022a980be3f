"""What a learner touches: check, guesses, the explorer, the progress file."""
