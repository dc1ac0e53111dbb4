"""Studies: what a run, or many of them, have to say."""
