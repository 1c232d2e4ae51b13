"""Input devices of people: what their bytes mean, and how a person takes over with one."""
