r"""How messages become releases, and what that costs.

::

    relay         every message is passed on as it is
    noisy         noisy weighted sums of clipped messages by a trusted server
    stream        running sums of single records: without noise, with the hub's, with each site's
    secure_sum    messages are added up, encrypted or not, with noise or without
    sum_messages  what travels there, and what both sides keep
    sum_hub       the hub's side: rounds, epochs, and who is lost and back
    sum_site      a site's side
"""
