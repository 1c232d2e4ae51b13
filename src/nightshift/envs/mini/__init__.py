"""libero_mini: its suite object, its objects, and its data (assets, BDDL files, frozen init states)."""
