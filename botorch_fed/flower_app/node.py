"""A site's node: fetches requests from the hub, and has the site's own process answer them.

It speaks Flower's fleet protocol in the place of `flower-supernode`. Nothing that the hub sends is
unpacked or run: no app is fetched, a message is bytes for the site's socket, and nothing listens.
Both ends of the connection show a certificate: the hub the one of its ``ca.crt``, the node its own.

This file imports nothing but Flower, its libraries and Python's own: it runs by its path, so that a
node needs neither torch nor the memory of the site's process. What goes wrong is told to the hub by
a word of a fixed list: no text of a site leaves.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

logger = logging.getLogger("botorch_fed.node")

COUNT = struct.Struct("<I")
LENGTH = struct.Struct("<Q")
MOST = 2**26  # bytes of one response, of one message, and of an answer
MOST_OBJECTS = 16  # that a message is made of; ours has three
ASKED = "query.respond"
FIRST_PAUSE, LONGEST_PAUSE = 0.3, 3.0  # seconds between two looks for requests
LONGEST_WAIT = 10.0  # seconds before the hub is tried again
REFUSALS = 5  # connections in a row that the hub closes without a word: it does not know the key
REFUSED = 3  # the exit code that says so


class Refused(Exception):
    """The hub does not take this node."""


class TooMuch(Exception):
    """More bytes than a message may have."""


# ------------------------------------------------------------------ the connection


class Connection(FleetHttpClient):
    """Flower's fleet calls over mutual TLS: no redirects, and no response longer than `MOST`."""

    def __init__(self, hub: str, authority: Path, key: Path, certificate: Path) -> None:
        private = load_pem_private_key(key.read_bytes(), None)
        if not isinstance(private, EllipticCurvePrivateKey):
            raise ValueError(f"Expected an EC key in {key}, got {type(private).__name__}.")
        self.public_key = public_key_to_bytes(private.public_key())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cafile=str(authority))
        context.load_cert_chain(certificate, key)
        super().__init__(
            f"https://{hub}",
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
            verify=context,
        )
        self._client.close()
        self._client = httpx.Client(
            verify=context,
            timeout=60.0,
            follow_redirects=False,
            headers={"accept-encoding": "identity"},
            event_hooks={"response": [_bound]},
        )


def _bound(response: httpx.Response) -> None:
    """Refuse what would take more memory than a message may."""
    if "content-encoding" in response.headers:
        raise TooMuch("the hub sends compressed data")
    response.stream = _Bounded(response.stream)


class _Bounded(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left = MOST
        for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise TooMuch(f"a response has more than {MOST} bytes")
            yield piece

    def close(self) -> None:
        self._stream.close()


# ------------------------------------------------------------------ the node


class SiteNode:
    """Asks a hub for requests and answers them, one after the other.

    Args:
        connection: To the hub.
        path: The socket of the site's process.
    """

    def __init__(self, connection: Connection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self._node: Node | None = None
        self._stopped = threading.Event()
        self._refused = threading.Event()

    def serve(self) -> None:
        """Until the process is stopped; `Refused` if the hub does not take this node."""
        silent = 0
        wait = 1.0
        while not self._stopped.is_set():
            try:
                self._work()
                return
            except (httpx.HTTPError, ValueError, TooMuch) as error:
                known = self._node is not None
                self._node = None
                if _says_refused(error):
                    raise Refused from error
                # A server that ends the handshake for want of a known certificate may say nothing.
                closed = isinstance(error, httpx.ReadError | httpx.WriteError)
                closed = closed or isinstance(error, httpx.RemoteProtocolError)
                silent = silent + 1 if closed and not known else 0
                if silent >= REFUSALS:
                    raise Refused from error
                wait = 1.0 if known else min(2 * wait, LONGEST_WAIT)
                pause = 1.0 if closed else wait
                logger.warning("The hub cannot be asked (%s); again in %g s.", _kind(error), pause)
            self._stopped.wait(pause)

    def stop(self) -> None:
        """End `serve`."""
        self._stopped.set()

    def _work(self) -> None:
        made = self.connection.ActivateNode(
            ActivateNodeRequest(
                public_key=self.connection.public_key,
                heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL,
            )
        )
        node = self._node = Node(node_id=made.node_id)
        logger.info("The hub knows this node.")
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(node, ended), daemon=True)
        beat.start()
        last = time.monotonic()
        try:
            while not self._stopped.is_set():
                if self._refused.is_set():
                    raise Refused
                if self._answer_next(node):
                    last = time.monotonic()
                quiet = time.monotonic() - last
                self._stopped.wait(min(max(quiet / 10, FIRST_PAUSE), LONGEST_PAUSE))
        finally:
            ended.set()
            with contextlib.suppress(httpx.HTTPError):
                self.connection.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _beat(self, node: Node, ended: threading.Event) -> None:
        beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        while not ended.wait(HEARTBEAT_DEFAULT_INTERVAL / 3):
            try:
                self.connection.SendNodeHeartbeat(beat)
            except Exception as error:  # the loop that asks for requests meets it as well
                if _says_refused(error):
                    self._refused.set()

    def _answer_next(self, node: Node) -> bool:
        found = self.connection.PullMessages(PullMessagesRequest(node=node))
        if not found.messages_list:
            return False
        announced = message_from_proto(found.messages_list[0])
        try:
            begun = time.monotonic()
            message = self._fetch(node, announced, found.message_object_trees[0])
            reply = answer(message, self.path)
            self._send(node, reply, time.monotonic() - begun)
        except httpx.HTTPStatusError as error:
            if _says_refused(error):
                raise
            logger.warning("A request is no longer wanted (%s).", _kind(error))
        except httpx.HTTPError:
            raise
        except Exception as error:  # of this message; its words may be the hub's
            logger.warning("A request cannot be read (%s).", _kind(error))
        return True

    def _fetch(self, node: Node, announced: Message, tree: ObjectTree) -> Message:
        """The whole message, of bounded size."""
        run = announced.metadata.run_id
        parts = len(list(iterate_object_tree(tree)))
        if parts > MOST_OBJECTS:
            raise TooMuch(f"a message has {parts} parts")
        pull = make_pull_object_fn_protobuf(self.connection.PullObject, node, run)
        room = MOST
        lock = threading.Lock()

        def bounded(name: str) -> bytes:
            nonlocal room
            data = pull(name)
            with lock:
                room -= len(data)
                if room < 0:
                    raise TooMuch(f"a message has more than {MOST} bytes")
            return data

        confirm = make_confirm_message_received_fn_protobuf(
            self.connection.ConfirmMessageReceived, node, run
        )
        message = pull_and_inflate_object_from_tree(tree, bounded, confirm, return_type=Message)
        message.metadata.__dict__["_message_id"] = tree.object_id  # no part of the bytes
        if message.metadata.run_id != run or message.metadata.dst_node_id != node.node_id:
            raise ValueError("it is for another node or run")
        return message

    def _send(self, node: Node, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run = reply.metadata.run_id
        with no_object_id_recompute():
            sent = self.connection.PushMessages(
                PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                )
            )
            push = make_push_object_fn_protobuf(
                self.connection.PushObject, node, run, sent.session_id
            )
            push_objects(
                get_all_nested_objects(reply), push, object_ids_to_push=set(sent.objects_to_push)
            )


def _says_refused(error: Exception) -> bool:
    """Whether the hub does not know the key, or the key is not that of the certificate."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.UNAUTHORIZED
    return isinstance(error, httpx.TransportError) and "alert" in str(error).lower()


def _kind(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "its certificate is not one of ca.crt"
    return (
        f"{type(error).__name__}: {error}" if isinstance(error, TooMuch) else type(error).__name__
    )


# ------------------------------------------------------------------ the site's socket


def answer(message: Message, path: Path) -> Message:
    """The answer of the site, or why there is none: "absent" or "failed"."""
    if message.metadata.message_type != ASKED:
        refused = Error(ErrorCode.UNKNOWN, f'A site answers "{ASKED}" and nothing else.')
        return Message(refused, reply_to=message)
    reply: dict[str, Any]
    try:
        fields: Any = message.content["request"]
        mode = b"defer" if fields["defer"] else b"wait"
        parts = [mode, fields["body"], *fields["blobs"]]
        found = _ask(str(path), parts, fields["seconds"])
        reply = {"answer": found} if found else {"code": "failed"}
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


def _end(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Serve a site's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hub", required=True, metavar="NAME:PORT")
    parser.add_argument("--ca", required=True, type=Path)
    parser.add_argument("--key", required=True, type=Path)
    parser.add_argument("--certificate", required=True, type=Path)
    parser.add_argument("--socket", required=True, type=Path)
    given = parser.parse_args()
    os.umask(0o077)
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("node: %(message)s"))
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _end)
    connection = Connection(given.hub, given.ca, given.key, given.certificate)
    try:
        SiteNode(connection, given.socket).serve()
    except Refused:
        logger.error("The hub does not take this node: have node.pub admitted.")
        return REFUSED
    except KeyboardInterrupt:
        pass
    finally:
        connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
