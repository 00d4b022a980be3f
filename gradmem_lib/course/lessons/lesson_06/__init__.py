"""Lesson 06: its exercises, its claims and what only they use."""
