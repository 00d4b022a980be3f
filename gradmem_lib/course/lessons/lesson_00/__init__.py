"""Lesson 00: its exercises, its claims and what only they use."""
