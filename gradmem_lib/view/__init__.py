"""Pictures of memory: the live plot, its static figure, and the explorer.

Import the part that you need.
"""
