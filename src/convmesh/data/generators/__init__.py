"""Generated samples, each a function of seed and index: every task can be tried without a download."""
