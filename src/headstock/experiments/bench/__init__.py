"""Measures how fast Headstock is on the machine it is on; one file for each kind of work."""
