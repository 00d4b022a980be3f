"""Lesson 08: its exercises, its claims and what only they use."""
