"""The public Python API: the verbs of the command line as typed functions. Its names are in `headstock` itself."""
