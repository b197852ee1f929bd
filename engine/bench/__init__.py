"""Measuring the engine on the card at hand: timings of the public generate call, its parts, and the kernels alone."""
