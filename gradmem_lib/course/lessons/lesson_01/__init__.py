"""Lesson 01: its exercises, its claims and what only they use."""
