"""RLPD: soft actor-critic from demos and experience, half and half (Ball et al. 2023)."""
