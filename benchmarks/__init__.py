"""Measurements of flashhopper and its peers on a Hopper GPU.

`python -m benchmarks` times operations, `benchmarks.variants` compares builds of the library, `benchmarks.record`
writes the record that the README's tables are generated from (`benchmarks.tables`).
"""
