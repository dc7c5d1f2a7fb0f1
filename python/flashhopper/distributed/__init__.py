"""Attention on DTensors: `import flashhopper.distributed` registers how each operator may be sharded. Before it: your
code; after it: sharding.py.
"""

from .sharding import register

__all__ = ["register"]

register()
