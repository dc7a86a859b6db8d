"""A loop of Hugging Face's accelerate on a split network: three lines differ from data parallelism, marked `changed`.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import convmesh as cm


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    cm.init()  # takes over the process group that accelerate opened, or runs alone
    set_seed(0)  # the same batches on every rank, which cuts its part out of each
    images = torch.randn(32, 1, 16, 16)
    loader = DataLoader(TensorDataset(images, (images[:, 0] > 0).long()), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))

    plan = cm.plan(model, (8, 1, 16, 16), cm.Mesh(height=accelerator.num_processes), "spatial")
    net = cm.parallelize(model, plan, loss=F.cross_entropy)  # changed: in place of accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=0.02))  # changed: the loader is not prepared

    losses = []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = net(net.shard_input(x), net.shard_target(y))  # changed: in place of F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    net.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.6f} to {losses[-1]:.6f}")
    state = net.full_state_dict()
    accelerator.save(state, "weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
