"""What a model is: its config and class, layers and sizes, and what is around it."""
