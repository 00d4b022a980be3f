"""Lesson 04: its exercises, its claims and what only they use."""
