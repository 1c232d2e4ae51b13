"""Perturbations: named, graded differences between the world of an episode and the one that a policy was trained in.

base.py says what one is, registry.py which there are, fleet.py how they are applied around simulators.
"""
