"""Muon (Keller Jordan, 2024): momentum whose update is made orthogonal, for the 2-D matrices inside the layers.

At this size it needs about half the tokens that AdamW needs. Matrices of one shape are updated together.
"""

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """Quintic Newton-Schulz iteration on [n, rows, columns]: singular values end near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                for parameter in parameters:
                    if "momentum" not in self.state[parameter]:
                        self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                grads = torch.stack([p.grad for p in parameters])
                momenta = torch.stack([self.state[p]["momentum"] for p in parameters])
                momenta.lerp_(grads, 1 - group["momentum"])
                updates = orthogonalise(grads.lerp_(momenta, group["momentum"]))  # Nesterov
                # The same root-mean-square of the update for every shape.
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, momentum, update in zip(parameters, momenta, updates):
                    self.state[parameter]["momentum"].copy_(momentum)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-scale)
