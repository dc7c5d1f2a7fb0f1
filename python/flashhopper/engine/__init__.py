"""The engines that compute attention: hopper (the kernels), tiled (torch ops) and reference (the float64 oracle)."""
