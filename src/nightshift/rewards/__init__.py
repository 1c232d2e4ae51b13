"""Where rewards come from: the simulator, or a classifier of success on camera images."""
