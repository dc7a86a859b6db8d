"""What the pages show is true: every complete example runs, generated parts are up to date, links lead somewhere.

Blocks marked ```python are complete programs and run here; fragments are marked ```py. A program that begins with
`# torchrun --nproc-per-node N` runs on N ranks.
"""

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tyro
from scripts import make_numbers, make_reference

from convmesh.cli.main import VERBS
from convmesh.supervise.world import World, free_port
from convmesh.testing import run_ranks
from tests.conftest import Pools

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    if page != README
    for number, code in enumerate(blocks(page))
]


def run_program(code: str, folder: str) -> str:
    """What a program prints, in a folder of its own."""
    before, printed = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "example.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        torch.manual_seed(0)
    return printed.getvalue()


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_as_printed(code: str, pools: Pools) -> None:
    ranks = re.match(r"# torchrun --nproc-per-node (\d+)", code)
    with tempfile.TemporaryDirectory() as folder:
        printed = pools[int(ranks[1])].run(run_program, code, folder)[0] if ranks else _alone(code, folder)
    assert printed.strip()


def _alone(code: str, folder: str) -> str:
    """In a process of its own where the program starts ranks itself or needs a main module."""
    if "run_ranks" not in code:
        return run_program(code, folder)
    (Path(folder) / "example.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "example.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=600).stdout


def launched(code: str, folder: str, port: int) -> str:
    """What a rank prints that a launcher has started: the environment tells it how to make a process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= World(ranks, ranks, (*range(ranks),), port=port).environment(rank)
    return run_program(code, folder)


def assert_learns(printed: str) -> None:
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_readmes_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = blocks(README)
    first, *others = run_ranks(4, launched, code, str(tmp_path), free_port())
    assert_learns(first)
    assert others == [""] * 3


@pytest.mark.full
def test_readmes_example_runs_under_torchrun(tmp_path: Path) -> None:
    (code,) = blocks(README)
    script = tmp_path / "first.py"
    script.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    assert_learns(printed)


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 100


def typed_commands() -> list[tuple[str, str, str]]:
    """Commands that pages tell people to type: page, verb and the rest."""
    pattern = re.compile(r"^    convmesh (\w+)(.*)$", re.MULTILINE)
    found = [(page.name, *match) for page in PAGES for match in pattern.findall(page.read_text(encoding="utf-8"))]
    return [(page, verb, rest) for page, verb, rest in found if "[" not in rest]  # not a synopsis


def test_commands_are_accepted_as_printed() -> None:
    """Their own tests run them; here it is their options."""
    commands = typed_commands()
    assert {verb for page, verb, _ in commands if page == "README.md"} == {*VERBS}
    for _, verb, rest in commands:
        options = getattr(importlib.import_module(VERBS[verb].module), f"{verb.capitalize()}Options")
        tyro.cli(options, args=shlex.split(rest, comments=True), config=(tyro.conf.FlagCreatePairsOff,))


def test_batch_scripts_are_bash() -> None:
    pages = ROOT / "docs/guides/launching.md", ROOT / "docs/guides/training.md"
    for code in (code for page in pages for code in blocks(page, "bash")):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_numbers_are_those_of_the_benchmark_pages() -> None:
    assert make_numbers.in_readme() == make_numbers.table(), "run `make docs`"


@pytest.mark.parametrize("name", ["api.md", "cli.md", "run_toml.md"])
def test_reference_is_up_to_date(name: str) -> None:
    assert (make_reference.FOLDER / name).read_text(encoding="utf-8") == make_reference.pages()[name], "run `make docs`"


def test_demo_runs() -> None:
    """On smaller volumes; on much smaller ones the run would end before a rank is killed."""
    command = [sys.executable, "examples/demo.py", "--extent", "48"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=1000).stdout
    assert "goes on with" in " ".join(printed.split())
    assert "Every loss equals the single process's" in printed


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)", index.read_text("utf-8"))}
    missing = [page.name for page in ROOT.glob("docs/**/*.md") if page.resolve() not in linked and page != index]
    assert not missing


def test_files_that_pages_name_exist() -> None:
    """Paths in code type, from the root of the repository or of the package."""
    homes = (ROOT, ROOT / "src" / "convmesh")
    named = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|toml|csv))(?:::\w+)?`")
    for page in PAGES:
        for path in named.findall(page.read_text(encoding="utf-8")):
            assert any((home / path).exists() for home in (*homes, page.parent)), f"{page.name}: {path}"
