"""Exact attention for NVIDIA Hopper GPUs."""
