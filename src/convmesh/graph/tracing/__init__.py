"""How a model is traced: proxies that know their shapes, values without data, and modules that stay closed."""
