"""LIBERO behind the seams of `envs.base`: a compiled control step, and many simulations per process."""
