"""Nights that are disturbed on purpose, and what must hold after each: `make soak`, docs/reliability.md."""
