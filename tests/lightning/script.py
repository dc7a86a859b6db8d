"""One training run of Lightning, as a user writes it: `python script.py NAME STRATEGY DEVICES`, or under torchrun.

The first rank prints what came out of it as JSON. Without a strategy Lightning trains in one process, as a reference.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import lightning as L
from convmesh.lightning import MeshStrategy

warnings.filterwarnings("ignore", module="lightning")


class Segmenter(L.LightningModule):  # type: ignore[misc]
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1)
        )
        self.accuracy, self.confusion = MulticlassAccuracy(2, average="micro"), MulticlassConfusionMatrix(2)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        out = self.net(x)
        self.accuracy(out, y)
        self.confusion.update(out, y)
        self.log_dict({"val_loss": F.cross_entropy(out, y), "count": float(len(x))}, sync_dist=True)
        self.log("accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.seen = self.confusion.compute().tolist()
        self.confusion.reset()

    def predict_step(self, batch: Any) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class WithForward(L.LightningModule):  # type: ignore[misc]
    """Layers and forward in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.dropout(self.one(x).relu(), 0.0, self.training))  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loaders() -> tuple[Any, Any]:
    x = torch.randn(16, 1, 12, 10)
    samples = TensorDataset(x, (x[:, 0] > 0).long())
    return DataLoader(samples, batch_size=4, shuffle=True), DataLoader(samples, batch_size=8)


def trainer(plan: str, devices: int, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
             "enable_checkpointing": False}  # fmt: skip
    more = quiet | {"precision": "64-true"} | options
    strategy = MeshStrategy(plan) if plan != "none" else "auto"
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **more)


def told(model: nn.Module, run: L.Trainer) -> dict[str, Any]:
    state = {name: value.double().flatten().tolist() for name, value in model.state_dict().items() if "net" in name}
    return {"metrics": {k: float(v) for k, v in run.callback_metrics.items()}, "state": state}


def all_of_it(plan: str, devices: int) -> dict[str, Any]:
    """Clipping, accumulation, validation, metrics; then a second fit, prediction, and going on from a checkpoint."""
    L.seed_everything(0)
    train, test = loaders()
    model = Segmenter()
    path = Path(tempfile.gettempdir(), f"convmesh-lightning-{plan}-{devices}-{os.getuid()}.ckpt")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "enable_checkpointing": False, "max_epochs": 1}
    first = trainer(plan, devices, **options)
    first.fit(model, train, test)
    out = {"first": told(model, first), "confusion": model.seen}
    first.save_checkpoint(path)
    first.fit_loop.max_epochs = 2
    first.fit(model, train, test)
    out["second"] = told(model, first)
    out["predicted"] = torch.cat(first.predict(model, test)).sum((1, 2, 3)).tolist()
    again, resumed = Segmenter(), trainer(plan, devices, **{**options, "max_epochs": 3})
    resumed.fit(again, train, test, ckpt_path=path)
    out["resumed"] = told(again, resumed)
    mixed = Segmenter(0.01)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    half = trainer(plan, devices, max_epochs=1, gradient_clip_val=1.0, precision=None, plugins=[scaled])
    half.fit(mixed, train)
    out["half"] = float(half.callback_metrics["loss"])
    simple = WithForward()
    by_value = trainer(plan, devices, max_epochs=1, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    by_value.fit(simple, train)
    out["simple"] = [value.double().sum().item() for value in simple.state_dict().values()]
    if first.is_global_zero:
        path.unlink()
    return out if first.is_global_zero else {}


if __name__ == "__main__":
    found = all_of_it(sys.argv[1], int(sys.argv[2]))
    if found:
        print("FOUND " + json.dumps(found), flush=True)  # noqa: T201
