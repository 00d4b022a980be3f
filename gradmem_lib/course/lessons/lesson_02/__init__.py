"""Lesson 02: its exercises, its claims and what only they use."""
