"""Sources of samples: one object per way in which samples are kept."""
