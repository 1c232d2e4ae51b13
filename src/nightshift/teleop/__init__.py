"""A person at the controls: a local web page that moves the robot, records demos and takes over a policy."""
