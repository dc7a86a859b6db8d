"""The store where supervisors meet, and the order in which they look for it: real sockets."""

import contextlib
import json
import socket
import threading
import time

import pytest

from convmesh.errors import RunError
from convmesh.supervise.meeting_store import OtherTokenError, StoreClient, StoreLostError, StoreServer
from convmesh.supervise.places import Places, Silence, Waiting
from convmesh.supervise.run_token import RunToken
from convmesh.supervise.world import free_port

TOKEN, OTHER = RunToken(b"secret of this run", "here"), RunToken(b"secret of another", "elsewhere")


def served() -> tuple[str, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    StoreServer(listener, TOKEN)
    return "127.0.0.1", int(listener.getsockname()[1])


def joined(place: tuple[str, int], seconds_call: float = 5) -> StoreClient:
    return StoreClient(place, TOKEN, 5, seconds_call)


def test_all_clients_see_the_same_values() -> None:
    place = served()
    one, other = joined(place), joined(place)
    assert one.get("key") is None
    one.set("key", {"a": [1, 2]})
    assert other.get("key") == {"a": [1, 2]}
    assert [one.add("count", 1), other.add("count", 1), one.add("count", 0)] == [1, 2, 2]
    one.close()
    other.close()


@pytest.mark.parametrize("line", [b"\x00\xff\n", b"[1]\n", b'{"do": "add", "key": "x"}\n', b"[" * 2_000_000 + b"\n"])
def test_a_stranger_who_says_what_is_no_proof_harms_nobody(line: bytes) -> None:
    place = served()
    with socket.create_connection(place, 5) as stranger, contextlib.suppress(ConnectionError):
        lines = stranger.makefile("rb")
        assert "number" in json.loads(lines.readline())
        stranger.sendall(line)
        assert lines.read() == b"", "hung up"
    _serves(place)


def _serves(place: tuple[str, int]) -> None:
    client = joined(place)
    client.set("key", 1)
    assert client.get("key") == 1
    client.close()


def test_a_member_who_says_what_is_no_question_harms_nobody() -> None:
    place = served()
    client = joined(place)
    with pytest.raises(StoreLostError, match="the connection was closed"):
        client.add("key", "no number")  # type: ignore[arg-type]
    client.close()
    _serves(place)


def test_who_has_another_token_learns_and_changes_nothing() -> None:
    place = served()
    member = joined(place)
    member.set("key", 1)
    with pytest.raises(OtherTokenError, match=r"127\.0\.0\.1:\d+ has another token than this one \(elsewhere\)"):
        StoreClient(place, OTHER, 5, 5)
    assert member.get("key") == 1
    member.close()


def test_a_proof_is_worth_nothing_on_another_connection() -> None:
    place, told = served(), ("1" * 64, "2" * 64)
    with socket.create_connection(place, 5) as stranger:
        lines = stranger.makefile("rb")
        lines.readline()
        overheard = {"number": told[1], "proof": TOKEN.proof("client", told)}
        stranger.sendall(json.dumps(overheard).encode() + b"\n")
        assert json.loads(lines.readline()) == {"proof": None}
        assert lines.read() == b"", "hung up"


def test_a_server_that_only_repeats_what_it_hears_is_not_believed() -> None:
    """A client's proof must not serve as the server's."""
    with socket.create_server(("127.0.0.1", 0)) as parrot:
        threading.Thread(target=_repeat, args=(parrot,), daemon=True).start()
        with pytest.raises(OtherTokenError):
            joined(parrot.getsockname())


def _repeat(parrot: socket.socket) -> None:
    connection, _ = parrot.accept()
    connection.sendall(b'{"number": "1"}\n')
    connection.sendall(connection.makefile("rb").readline())
    connection.close()


def test_strangers_who_keep_silent_do_not_keep_members_from_their_store() -> None:
    place = served()
    member = joined(place)
    with contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(socket.create_connection(place, 5)) for _ in range(100)]
        assert silent[0].makefile("rb").read().count(b"\n") == 1, "asked for its proof, and hung up on"
        assert silent[-1].recv(1), "the latest may still prove who they are"
        member.set("key", 1)
        assert member.get("key") == 1
        _serves(place)
    member.close()
    _serves(place)


def test_a_server_that_does_not_answer_is_lost_in_time() -> None:
    """A process that is stopped still has connections."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(StoreLostError, match=r"lost 127\.0\.0\.1:\d+ \(timed out\)"),
    ):
        joined(mute.getsockname(), seconds_call=0.2)


def test_supervisors_meet_at_the_first_place_that_serves() -> None:
    (host, port), unserved = served(), free_port()
    places = Places(f"127.0.0.1:{unserved},{host}:{port}", TOKEN, seconds_call=5)
    client, serves = places.find(Waiting(60, 60), lambda: True)
    assert (serves, places.current) == (False, 1)
    client.close()
    places.close()


def test_a_place_serves_when_those_before_it_are_gone_and_the_folder_is_free() -> None:
    """192.0.2.1 is nobody's address (RFC 5737)."""
    places = Places(f"192.0.2.1:1,127.0.0.1:{free_port()}", TOKEN, seconds_call=5)
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
        Places("192.0.2.1:1", TOKEN, seconds_call=5).find(Waiting(0.1, 0.1), lambda: True)
    with pytest.raises(RunError, match="nobody answers there, and a host that cannot be reached has the run folder"):
        Places("192.0.2.1:1", TOKEN, seconds_call=5).find(Waiting(0.1, 0.1), lambda: False)


def test_only_the_lost_place_that_refuses_is_not_waited_for() -> None:
    waiting = Waiting(20.0, 60.0, lost=0)
    assert [waiting.of(0, Silence.REFUSES), waiting.of(0, Silence.SILENT), waiting.of(1, Silence.REFUSES)] == [
        0,
        20,
        20,
    ]
