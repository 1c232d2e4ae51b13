"""OpenVLA-OFT and its variants."""
