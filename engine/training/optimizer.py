"""AdamW over fp32 masters of a network that computes in another dtype."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Each parameter's gradient begins at a multiple of so many words within the one tensor of them all.
_ALIGNED_WORDS = 64


class MasterAdamW:
    """AdamW whose parameters are fp32 copies of the network's trained ones.

    A bf16 weight keeps 8 bits: most updates are smaller than its last one and would be lost. So each step reads the
    network's gradients, updates the masters, and rounds them back into the network.

    Args:
        network: its parameters with `requires_grad` are trained.
        weight_decay: of matrices; vectors (norms) have none.
        grad_clip_norm: bound of the gradient's 2-norm over all parameters.
    """

    BETAS = (0.9, 0.95)

    def __init__(self, network: nn.Module, weight_decay: float, grad_clip_norm: float) -> None:
        self._trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
        self._clip = grad_clip_norm
        self.masters = {n: p.detach().float().clone().requires_grad_() for n, p in self._trained.items()}
        sizes = [-(-p.numel() // _ALIGNED_WORDS) * _ALIGNED_WORDS for p in self.masters.values()]
        device = next(iter(self.masters.values())).device
        self._flat = torch.zeros(sum(sizes), device=device)  # all gradients in one piece, for ranks to sum
        self._gradients = []
        for master, words in zip(self.masters.values(), self._flat.split(sizes), strict=True):
            master.grad = words[: master.numel()].view(master.shape)
            self._gradients.append(master.grad)
        matrices = [p for p in self.masters.values() if p.dim() > 1]
        vectors = [p for p in self.masters.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # The rate is a tensor-free float, set before each step by `step`.
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=self.BETAS, fused=True)

    def step(self, learning_rate: float, sum_: Callable[[torch.Tensor], None] = lambda flat: None) -> torch.Tensor:
        """Apply the network's gradients and clear them. Waits for no device.

        Args:
            learning_rate: of this step.
            sum_: replaces the gradients [n], fp32, by their sum over the ranks.

        Returns the gradient's norm before clipping, a scalar on the masters' device.
        """
        self._take_gradients()
        sum_(self._flat)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self._clip)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.write_back()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments; plain tensors and numbers only."""
        return {"masters": {n: p.detach() for n, p in self.masters.items()}, "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def tensors(self, *, moments: bool) -> list[torch.Tensor]:
        """The masters, and the moments (made where there are none yet), in one order: what ranks must have alike."""
        found = [master.detach() for master in self.masters.values()]
        if not moments:
            return found
        for master in self.masters.values():
            state = self._adamw.state[master]
            if not state:  # as AdamW's first step would make it
                state["step"] = torch.zeros((), device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            found += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both, and the network's rounded parameters with them."""
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        self._adamw.load_state_dict(state["adamw"])
        self.write_back()

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """The network's gradients become the masters' own, in fp32; a parameter without one gets zero."""
        found = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in self._trained.values()]
        torch._foreach_copy_(self._gradients, found)
        for parameter in self._trained.values():
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """The masters, rounded, become the network's parameters."""
        torch._foreach_copy_(list(self._trained.values()), list(self.masters.values()))
