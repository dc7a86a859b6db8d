"""Users' system files: inherited, included and removed keys, and how they are marked."""

import re
from pathlib import Path

import pytest

import convmesh as cm

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_example_of_the_docs_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(text.splitlines()) == 10
    system = cm.System.load(write(tmp_path, "ours", text))
    assert (system.name, int(system.node.devices), str(system.device.bytes_memory)) == ("ours", 4, "40 GiB")
    assert system.links[1].bytes_per_second_each == 25e9 / 4
    assert (system.device.bytes_memory.origin, system.device.bytes_memory.source) == (
        "datasheet", "the vendor's offer of 2026-10",
    )  # fmt: skip
    assert (system.power.watts_host.origin, system.power.watts_host.spread) == ("measured", (850, 950))
    own = {key for key, figure in system.figures() if not figure.inherited}
    assert own == {"node.devices", "device.bytes_memory", "device.bytes_per_second_memory", "links.nvswitch.devices",
                   "links.network.shared_by", "power.watts_host"}  # fmt: skip


def test_python_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[-2:] == ["312 TFLOP/s", "network"]


def test_inherited_figures_are_guesses_that_name_their_system(tmp_path: Path) -> None:
    system = cm.System.load(write(tmp_path, "same", 'inherits = "abci"\n'))
    parent = cm.System.load("abci")
    for (key, figure), (_, old) in zip(system.figures(), parent.figures(), strict=True):
        assert (figure.value, figure.origin, figure.inherited) == (old.value, "guess", "abci"), key
        assert figure.source == f"inherited from abci ({old.origin}: {old.source})"


def test_inheritance_has_many_generations_and_paths(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    write(tmp_path, "base", 'inherits = "dgx-a100"\npower.watts_host = 900\n')
    path = write(tmp_path / "sites", "here", 'inherits = "../base.toml"\npower.facility_overhead = 1.05\n')
    power = cm.System.load(path).power
    assert (power.facility_overhead.inherited, power.watts_host.inherited) == ("", "base")
    assert power.watts_device_busy.inherited == "dgx-a100"
    assert power.facility_overhead.origin == "guess"
    assert power.facility_overhead.source == "stated in here.toml without an origin"


def test_included_parts_keep_their_origins(tmp_path: Path) -> None:
    system = cm.System.load(write(tmp_path, "newer", 'inherits = "dgx-a100"\nincludes = ["h200-sxm5"]\n'))
    assert (system.device.kind, system.device.fraction_memory.origin) == ("H200-SXM5-141GB", "measured")
    assert system.node.devices.inherited == "dgx-a100"


def test_false_removes_an_inherited_key(tmp_path: Path) -> None:
    text = 'inherits = "abci"\nlinks.rack = false\nnode.count = false\ncollectives.methods.tree-ll = false\n'
    system = cm.System.load(write(tmp_path, "flat", text))
    assert [level.name for level in system.links] == ["nvlink", "spine"]
    assert system.node.count is None
    assert "tree-ll" not in {method.name for method in system.collectives.methods}


def test_named_sources_serve_many_figures(tmp_path: Path) -> None:
    text = """
inherits = "dgx-h100"
power.watts_host = { value = "4 kW", from = "meter", spread = ["3 kW", "5 kW"] }
[sources]
meter = { origin = "measured", text = "the rack's meter", date = 2026-11-01 }
"""
    host = cm.System.load(write(tmp_path, "metered", text)).power.watts_host
    assert host.provenance == "the rack's meter, 2026-11-01, between 3 kW and 5 kW"
    assert (str(host), host.origin) == ("4 kW", "measured")


def test_bounded_systems_have_a_last_rank(tmp_path: Path) -> None:
    text = 'inherits = "dgx-a100"\nlinks.network.devices = 32\n'
    system = cm.System.load(write(tmp_path, "small", text))
    assert system.most_devices == 32
    with pytest.raises(
        cm.MeshError, match=r"rank 32 has no place on small, whose links join 32 devices, from 0 to 31\."
    ):
        system.spans(cm.Mesh(data=33), ["data"])
