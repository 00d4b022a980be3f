"""Lesson 07: its exercises, its claims and what only they use."""
