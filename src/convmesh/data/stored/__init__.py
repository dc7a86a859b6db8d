"""Arrays in files, of which a box is read: one module per format."""
