r"""Engines carry bytes between a server and its agents, independent of any algorithm.

::

    inprocess    function calls, always through bytes
    parallel     several processes on one machine, with identical results
"""
