"""Files that are written whole, checked when read, and never executed."""
