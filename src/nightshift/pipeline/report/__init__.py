"""The report of a run: one HTML file that needs nothing else, and a site of all nights.

Not in reports/, which `evaluate` depends on: a better page must not make an evaluation stale.
"""
