"""Modules that stand in for other packages' attention, with their names and argument order. Before it: your code; after
it: interface.py.
"""
