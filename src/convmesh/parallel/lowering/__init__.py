"""Working a plan out for a network: dry runs, layouts, programs."""
