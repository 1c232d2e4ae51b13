"""The suite `robot`: one robot, or a simulator, behind an HTTP server that speaks docs/robot_protocol.md."""
