"""Arrays in files that are read by box: one module per format."""
