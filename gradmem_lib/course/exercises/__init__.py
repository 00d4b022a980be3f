"""The exercises of each lesson: a reference, and the mistakes that people make."""
