"""Lesson 10: its exercises, its claims and what only they use."""
