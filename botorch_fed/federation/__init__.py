r"""The common parts of all protocols.

::

    hub           the events of a hub's log, and the state that they give
    trial         a site's trials and the events of its log
    terms         the terms that all parties agree upon; the interfaces of searches and aggregations
    agent         a site's side of every protocol
    server        the hub's side of every protocol
    disclosure    Sees and Price: the readers of each message, and the privacy cost of a run
    registry      protocols by the names that study files use
"""
