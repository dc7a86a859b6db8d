"""The support page: one sample call of every split function, tried with each dim cut."""
