r"""Hazardous: identities, pairwise keys and streams under the masks. Prefer `botorch_fed.privacy`.

::

    new_identity, sign, is_signed     Ed25519
    new_exchange, pair_key            X25519, then HKDF with SHA-256
    seal, unseal                      ChaCha20-Poly1305; a key seals one text
    derived                           a key for one purpose from another key: keyed BLAKE2b
    stream, Streams                   ChaCha20; a key gives one stream

All of it is `cryptography`'s, on raw bytes. X25519 and Ed25519 do not withstand a quantum computer.
"""

from __future__ import annotations

import hashlib

from botorch_fed.errors import MessageError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
_ONCE = bytes(12)  # the nonce of a key that seals one text


def new_identity() -> bytes:
    """A private identity key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_identity(private: bytes) -> bytes:
    """The public part of an identity key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, text: bytes) -> bytes:
    """The signature of a text."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private).sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether a signature of a text is that of a public identity key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_exchange() -> bytes:
    """A private key of an exchange, for one epoch."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public_exchange(private: bytes) -> bytes:
    """The public part of a key of an exchange."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def pair_key(private: bytes, public: bytes, *, salt: bytes, purpose: bytes) -> bytes:
    """The key that two parties share.

    Raises:
        MessageError: The public key is a point of small order, which anybody shares with anybody.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import (
        X25519PrivateKey,
        X25519PublicKey,
    )
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        peer = X25519PublicKey.from_public_bytes(public)
        shared = X25519PrivateKey.from_private_bytes(private).exchange(peer)
    except ValueError:
        raise MessageError("An announced key agrees with nobody.") from None
    return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(shared)


def check_exchange(public: bytes) -> None:
    """Raise `MessageError` for a public key that agrees with nobody."""
    pair_key(b"\1" * KEY_BYTES, public, salt=b"", purpose=b"")


def derived(key: bytes, *purpose: bytes) -> bytes:
    """A key for one purpose."""
    state = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"botorch_fed")
    for part in purpose:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    """A text that only holders of the key read; the key must seal no other one."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(_ONCE, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """The text; `MessageError` unless key, text and context are those that were sealed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, sealed, context)
    except (InvalidTag, ValueError):
        raise MessageError("A sealed key was changed, or is for somebody else.") from None


def stream(key: bytes, size: int) -> bytearray:
    """So many pseudorandom bytes; the key must give no other stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)
    data = bytearray(size)
    cipher.encryptor().update_into(data, data)
    return data


class Streams:
    """Streams of many keys, each in the memory of the one before: for what is used at once."""

    def __init__(self) -> None:
        self._zeros, self._data = b"", bytearray()

    def __call__(self, key: bytes, size: int) -> bytearray:
        """See `stream`; until the next call."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        if len(self._zeros) != size:
            self._zeros, self._data = bytes(size), bytearray(size)
        cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)
        cipher.encryptor().update_into(self._zeros, self._data)
        return self._data
