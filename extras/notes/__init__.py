"""What the records of a run mean in plain words."""
