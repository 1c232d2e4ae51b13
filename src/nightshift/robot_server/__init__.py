"""A robot server: the protocol of docs/robot_protocol.md around an arm, and simulators as such arms."""
