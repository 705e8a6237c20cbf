r"""How messages become releases, and what that costs.

relay       every message is passed on as it is
"""
