"""Metrics as sums, of each kind of target."""
