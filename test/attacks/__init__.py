"""Attacks on sums under a joint key: what they once told, and what they tell now."""
