"""Hands the bytes of a message on to the site's own process, and its answer back.

Flower starts a new process for every message, so that this file imports nothing but Flower and
Python's own library. What goes wrong is told by a word of a fixed list: no text of a site leaves.
"""

import socket
import struct
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

COUNT = struct.Struct("<I")
LENGTH = struct.Struct("<Q")
MOST = 2**30  # bytes of an answer

app = ClientApp()


@app.query("respond")
def respond(message: Message, context: Context) -> Message:
    """The answer of the site, or why there is none: "absent" or "failed"."""
    reply: dict[str, Any]
    try:
        fields: Any = message.content["request"]
        mode = b"defer" if fields["defer"] else b"wait"
        parts = [mode, fields["body"], *fields["blobs"]]
        answer = _ask(str(context.node_config["socket"]), parts, fields["seconds"])
        reply = {"answer": answer} if answer else {"code": "failed"}
    except Exception:
        reply = {"code": "absent"}
    return Message(RecordDict({"reply": ConfigRecord(reply)}), reply_to=message)


def _ask(path: str, parts: list[bytes], seconds: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(path)
        connection.sendall(COUNT.pack(len(parts)))
        for part in parts:
            connection.sendall(LENGTH.pack(len(part)) + part)
        _exactly(connection, COUNT.size)  # one byte string comes back
        (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
        if size > MOST:
            raise ValueError("too long")
        return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 2**20))
        if not piece:
            raise ConnectionError
        data += piece
    return bytes(data)
