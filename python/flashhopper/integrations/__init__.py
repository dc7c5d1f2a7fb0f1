"""flashhopper inside other frameworks: transformers, torch's SDPA, diffusers. Before it: your code; after it:
interface.py.

Each module has one `register()`, which may be called again and imports its framework then, not earlier. What
flashhopper has no kernel for (dropout, ALiBi, arbitrary masks) is refused by name and never ignored.
"""
