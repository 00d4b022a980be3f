"""What a teacher touches: the board of a class."""
