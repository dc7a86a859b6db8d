"""The lowered network as a module that runs."""
