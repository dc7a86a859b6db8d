"""How a model is traced: proxies that know their shapes, values without data, and what stays closed."""
