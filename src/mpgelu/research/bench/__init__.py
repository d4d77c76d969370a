"""Speed, measured: every method in one process, in turns, so that ratios survive a noisy machine."""
