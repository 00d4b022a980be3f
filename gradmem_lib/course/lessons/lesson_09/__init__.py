"""Lesson 09: its exercises, its claims and what only they use."""
