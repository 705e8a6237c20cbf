r"""How messages become releases, and what that costs.

relay       every message is passed on as it is
stream      running sums of single records: without noise, with the hub's, with each site's own
"""
