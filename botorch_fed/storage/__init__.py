r"""What a party must not lose. Knows no protocol, and no privacy.

log          events in order, each with a hash of all before it: what a party has done
snapshots    large objects, to which events refer
store        named bytes
"""
