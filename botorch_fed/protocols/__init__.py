r"""Agents and servers as pure state machines, and the one loop that drives them.

base      Agent, Server, and the frames around their messages
store     what must survive a crash: observations, records, secrets, broadcasts
site      Site.respond: one request in, one reply out, whatever happens in between
drive     drive: the server's loop
"""
