"""The store where supervisors meet, and the order in which they look for it: real sockets."""

import contextlib
import socket
import time

import pytest

from convmesh.errors import RunError
from convmesh.supervise.meeting_store import StoreClient, StoreLostError, StoreServer
from convmesh.supervise.places import Places, Silence, Waiting
from convmesh.supervise.world import free_port


def served() -> tuple[str, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    StoreServer(listener)
    return "127.0.0.1", int(listener.getsockname()[1])


def test_all_clients_see_the_same_values() -> None:
    place = served()
    one, other = StoreClient(place, 5, 5), StoreClient(place, 5, 5)
    assert one.get("key") is None
    one.set("key", {"a": [1, 2]})
    assert other.get("key") == {"a": [1, 2]}
    assert [one.add("count", 1), other.add("count", 1), one.add("count", 0)] == [1, 2, 2]
    one.close()
    other.close()


@pytest.mark.parametrize("line", [b"\x00\xff\n", b"[1]\n", b'{"do": "add", "key": "x"}\n', b"[" * 2_000_000 + b"\n"])
def test_a_stranger_who_says_what_is_no_question_harms_nobody(line: bytes) -> None:
    place = served()
    with socket.create_connection(place, 5) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(line)
        assert stranger.recv(65536) == b"", "hung up"
    client = StoreClient(place, 5, 5)
    client.set("key", 1)
    assert client.get("key") == 1
    client.close()


def test_a_server_that_does_not_answer_is_lost_in_time() -> None:
    """A process that is stopped still has connections."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = StoreClient(mute.getsockname(), 5, seconds_call=0.2)
        with pytest.raises(StoreLostError, match=r"lost 127\.0\.0\.1:\d+ \(timed out\)"):
            client.get("key")
        client.close()


def test_supervisors_meet_at_the_first_place_that_serves() -> None:
    (host, port), unserved = served(), free_port()
    places = Places(f"127.0.0.1:{unserved},{host}:{port}", seconds_call=5)
    client, serves = places.find(Waiting(60, 60), lambda: True)
    assert (serves, places.current) == (False, 1)
    client.close()
    places.close()


def test_a_place_serves_when_those_before_it_are_gone_and_the_folder_is_free() -> None:
    """192.0.2.1 is nobody's address (RFC 5737)."""
    places = Places(f"192.0.2.1:1,127.0.0.1:{free_port()}", seconds_call=5)
    asked: list[float] = []

    def is_free() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    client, serves = places.find(Waiting(0.1, 60, lost=0), is_free)
    assert (serves, places.current) == (True, 1)
    assert len(asked) > 2
    client.set("key", 1)
    client.close()
    places.close()


def test_without_a_place_of_its_own_a_supervisor_gives_up_in_time() -> None:
    with pytest.raises(RunError, match="nobody answers there\\."):
        Places("192.0.2.1:1", seconds_call=5).find(Waiting(0.1, 0.1), lambda: True)
    with pytest.raises(RunError, match="nobody answers there, and a host that cannot be reached has the run folder"):
        Places("192.0.2.1:1", seconds_call=5).find(Waiting(0.1, 0.1), lambda: False)


def test_only_the_lost_place_that_refuses_is_not_waited_for() -> None:
    waiting = Waiting(20.0, 60.0, lost=0)
    assert [waiting.of(0, Silence.REFUSES), waiting.of(0, Silence.SILENT), waiting.of(1, Silence.REFUSES)] == [
        0,
        20,
        20,
    ]
