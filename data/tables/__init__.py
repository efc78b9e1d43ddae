"""Tables of samples: CSV, TSV and JSON lines."""
