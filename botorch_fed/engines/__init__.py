r"""Engines carry bytes between a server and its agents; they know no algorithm.

inprocess    function calls, always through bytes
parallel     the same over several processes, with identical results
"""
