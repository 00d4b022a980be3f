"""What the exercises and claims of two or more lessons use."""
