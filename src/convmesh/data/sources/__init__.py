"""Sources of samples: one class for each way of keeping samples."""
