r"""Bytes on the wire and in state files: one closed, versioned, size-limited codec.

::

    codec    encode(obj), decode(data, *expected), content_hash(data)

Messages and states are frozen dataclasses of numbers, strings, bytes and tensors. The codec builds
only the classes that its caller expects. It does not use pickle.
"""
