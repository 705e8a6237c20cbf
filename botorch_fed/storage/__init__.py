r"""Durable storage of a party. It does not depend on protocols or privacy.

::

    log          the party's events in order, each with a hash of all events before it
    snapshots    large objects, to which events refer
    store        named bytes
"""
