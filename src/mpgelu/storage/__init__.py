"""Files that are written atomically, verified when read, and never executed."""
