"""Imports `load` for verbs that use a finished run, as fast as torch allows.

Importing torch creates hundreds of thousands of objects that live until the process ends. Without the garbage
collector the import takes about a fifth less, and what is frozen is not searched at exit either. A library must not
do this to its caller's process, so only verbs import `load` from here.
"""

import gc

_enabled = gc.isenabled()
gc.disable()
try:
    from headstock.inference.pipeline import load as load

    gc.freeze()
finally:
    if _enabled:
        gc.enable()
