"""Lesson 11: its exercises, its claims and what only they use."""
