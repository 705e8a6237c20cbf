r"""Protocols: agents and servers as pure state machines; no sockets, clocks or threads.

base     Agent, Server, Pending, the frames of requests and replies, journal and secrets
drive    respond and drive: the only loop there is
"""
