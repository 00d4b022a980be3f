"""Which recipes fit which card."""
