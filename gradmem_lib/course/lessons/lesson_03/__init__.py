"""Lesson 03: its exercises, its claims and what only they use."""
