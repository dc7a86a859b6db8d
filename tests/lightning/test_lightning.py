"""Lightning's own trainer on split networks: all that it reports and leaves behind is one process's.

Needs Lightning (`pip install 'convmesh[lightning]'`); `make test-ecosystem` runs it in an environment of its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

SCRIPT = Path(__file__).parent / "script.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def run(*arguments: str, status: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *arguments]
    done = subprocess.run(line, check=False, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == status, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout if status == 0 else done.stderr


def found(text: str) -> dict[str, Any]:
    line = next(line for line in text.splitlines() if line.startswith("FOUND "))
    result: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return result


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return found(run(str(SCRIPT), "none", "1"))


@pytest.mark.parametrize(("launcher", "plan"), [((), "spatial"), (TORCHRUN, "filter"), (TORCHRUN, "auto")])
def test_a_trainer_leaves_what_one_process_does(
    launcher: tuple[str, ...], plan: str, one_process: dict[str, Any]
) -> None:
    split = found(run(*launcher, str(SCRIPT), plan, "2"))
    assert split.pop("half") == pytest.approx(one_process["half"], rel=0.02)  # float16
    expected = {name: value for name, value in one_process.items() if name != "half"}
    assert_close(split, expected)


def assert_close(value: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        for name in expected:
            assert_close(value[name], expected[name])
    elif expected and isinstance(expected, list) and isinstance(expected[0], list):
        assert value == expected  # counts
    else:
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_misuse_ends_in_one_error() -> None:
    from torch import nn

    import convmesh as cm
    import lightning
    from convmesh.lightning import MeshStrategy
    from convmesh.lightning.split_module import network_of
    from convmesh.lightning.split_setting import check_plan

    class Two(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    with pytest.raises(cm.PlanError, match=r"`plan` \(=3\) must be 'auto', a preset"):
        MeshStrategy(plan=3)  # type: ignore[arg-type]
    with pytest.raises(cm.PlanError, match=r"`outputs` \(='local'\) must be 'cut' or 'whole'"):
        MeshStrategy(outputs="local")  # type: ignore[arg-type]
    with pytest.raises(cm.PlanError, match="leave `mesh` out"):
        MeshStrategy(plan="plan.toml", mesh=cm.Mesh(data=2))
    with pytest.raises(cm.PlanError, match=r"2 parts with weights; its parts are 'one', 'two'"):
        network_of(Two(), None)
    with pytest.raises(cm.PlanError, match=r"`network` \(='three'\) is no part of Two"):
        network_of(Two(), "three")
    stages = cm.plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (4, 2), cm.Mesh(pipe=2), "pipeline")
    with pytest.raises(cm.UnsupportedError, match="is a pipeline, which computes the loss itself"):
        check_plan(stages)


WRONG = """
from script import Segmenter, loaders
from convmesh.lightning import MeshStrategy

class Own(Segmenter):
    def training_step(self, batch):
        return batch[0].mean()

strategy, model = MeshStrategy("data"), Own()
import lightning as L
L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, max_epochs=1).fit(model, *loaders())
"""


def test_a_module_that_does_not_call_its_network_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    told = run(str(tmp_path / "wrong.py"), status=1)
    assert "`training_step` does not call the network 'net'" in told.splitlines()[-1]
