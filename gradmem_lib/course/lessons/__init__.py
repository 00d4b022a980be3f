"""The lessons: a folder each, with what its exercises and claims are made of."""
