"""The bytes of a step before it runs."""
