"""A recipe, and the one step that carries it out."""
