"""Hosts like this machine, one rank on each, joined by a link of known numbers."""

from __future__ import annotations

from dataclasses import replace

from convmesh.errors import SystemFileError
from convmesh.system import Collectives, Figure, LinkLevel, Method, System
from convmesh.system.curves import steps_of
from convmesh.system.transfer_table import Overlap, TransferTable

PAIR = 2
"""Ranks between which this machine's messages were timed."""

CROSSINGS = 2
"""How often a message crosses the link: Gloo sends data once told that the other side is waiting for it
(gloo/transport/tcp/pair.cc, `sendNotifyRecvReady`), and ranks begin to wait when they begin to send."""

BYTES_ONE_PIECE = 8
"""A sum that Gloo's ring does not cut: two values of 4 bytes, such as a loss and its weight. Each rank's part is two
segments of at least one value (gloo/allreduce.cc), so the first rank has all of it and the others' parts are empty. It
goes from rank to rank and back, and each receiver announced long before that it is waiting: one crossing a step."""

BESIDE = Overlap(active=1, compute_slowdown=1.0, transfer_slowdown=1.0, hidden=1.0)
"""Data on a link keeps no core busy: computing goes on meanwhile."""


def joined_hosts(
    local: System, *, bytes_per_second: float, seconds_latency: float, fraction_wire: float = 1.0
) -> System:
    """A calibrated machine without GPUs as the hosts of a cluster.

    A message takes what `local.transfers` has for a small one, plus twice the link's latency. `fraction_wire` of the
    link's bandwidth is left for data after headers.
    """
    table = local.transfers
    if table is None:
        raise SystemFileError(f"`local` (={local.name!r}) must have timed transfers; calibrate it for two ranks.")
    known = "what the link is known to have"
    one = Figure(1.0, "", "datasheet", "one rank on each host, and a port of its own")
    level = LinkLevel(
        name="network",
        medium="network",
        bytes_per_second=Figure(bytes_per_second, "B/s", "datasheet", known),
        shared_by=one,
        oversubscription=one,
        seconds_latency=_latency(CROSSINGS * seconds_latency, table, "neighbour"),
    )
    return replace(
        local,
        name="hosts",
        summary=f"Hosts like {local.name}, one rank on each",
        node=replace(local.node, devices=one, cores=one),
        links=(level,),
        collectives=_gloo(seconds_latency, fraction_wire, table),
        transfers=replace(table, overlaps=(BESIDE,)),
    )


def _gloo(seconds_latency: float, fraction_wire: float, table: TransferTable) -> Collectives:
    ring = Method(
        name="ring-simple",
        algorithm="ring",
        protocol="simple",
        fraction_bandwidth=Figure(1.0, "", "guess", "a link that is slower than memory"),
        seconds_start=Figure(0.0, "s", "guess", "counted in the steps"),
        seconds_step={"network": _latency(CROSSINGS * seconds_latency, table, "all_reduce")},
    )
    one_piece = replace(
        ring,
        name="ring-one-piece",
        seconds_step={"network": _latency(seconds_latency, table, "all_reduce")},
        bytes_payload_most=Figure(BYTES_ONE_PIECE, "B", "publication", "gloo/allreduce.cc"),
    )
    wire = Figure(fraction_wire, "", "datasheet", "bytes of a packet less its headers")
    return Collectives(library="Gloo", methods=(ring, one_piece), fraction_wire={"network": wire})


def _latency(seconds_link: float, table: TransferTable, carrier: str) -> Figure:
    """Latency of one message: the time on the link, and what the library took for a small one on this machine."""
    own = table.seconds(carrier, ranks=PAIR, active=PAIR, bytes_sent=0)
    if own is None:
        raise SystemFileError(f"the transfer table must have {carrier!r} between {PAIR} ranks; calibrate again.")
    each = own.seconds / steps_of(carrier, PAIR)
    source = f"{each:.2g} s in the library, {seconds_link:.2g} s on the link"
    return Figure(seconds_link + each, "s", "measured", source)
