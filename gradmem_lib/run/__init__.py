"""What ``gradmem run`` does: it runs a script as Python would, measures it, and writes a report."""
