"""Nightshift trains robot policies overnight."""
