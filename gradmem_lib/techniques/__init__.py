"""What the lessons build, each file readable on its own."""
