"""Parameters, FLOPs and training memory of models, in closed form."""
