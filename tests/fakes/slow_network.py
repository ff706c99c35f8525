"""A network whose steps take a known time, however fast the machine is: for trainings that are interrupted."""

import time

import torch


class SlowNet(torch.nn.Module):
    def __init__(self, numeric: int, sizes: tuple[int, ...], outputs: int, *, pause_s: float) -> None:
        super().__init__()
        self.embed = torch.nn.ModuleList(torch.nn.Embedding(size, 4) for size in sizes)
        self.head = torch.nn.Linear(numeric + 4 * len(sizes), outputs)
        self.pause_s = pause_s

    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pause_s)
        parts = [num, *(embed(cat[:, place]) for place, embed in enumerate(self.embed))]
        answer: torch.Tensor = self.head(torch.cat(parts, dim=1))
        return answer
