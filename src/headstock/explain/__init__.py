"""Shows what a model is made of and what goes on inside it: the textbook's formula beside the measured number."""
