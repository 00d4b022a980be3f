"""Processes, ranks, environment variables, the course's files, private names of torch."""
