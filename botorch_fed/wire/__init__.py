r"""Bytes on the wire and in state files: one closed, versioned, size-limited codec.

    codec    encode(obj), decode(data, *expected), content_hash(data)

Messages and states are frozen dataclasses of numbers, strings, bytes and tensors; the codec builds
exactly the classes it is asked for and nothing else. There is no pickle here.
"""
