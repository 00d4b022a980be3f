"""Lesson 05: its exercises, its claims and what only they use."""
