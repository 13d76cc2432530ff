"""The operator in an attention module of your own: four lines more than without.

python examples/own_module.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gape


class Attention(nn.Module):
    """Causal self-attention with rotary positions and gates, (B, N, E) → (B, N, E)."""

    def __init__(self, width: int, heads: int, context_length: int) -> None:
        super().__init__()
        self.heads, self.context_length = heads, context_length
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rope = gape.positions.build("rope", n_heads=heads, head_dim=width // heads)
        self.gates = gape.GAPEGates(n_heads=heads, head_dim=width // heads)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; any length may come, T stays."""
        batch, n, width = x.shape
        q, k, v = self.qkv(x).view(batch, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # The gates read q and k before they are rotated.
        gate, landmark = self.gates(q, k)
        positions = torch.arange(n, device=x.device)
        q, k = self.rope.rotate(q, positions), self.rope.rotate(k, positions)
        y = gape.gated_attention(
            q, k, v, gate, landmark, self.gates.amplitude, context_length=self.context_length
        )  # fmt: skip
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, n, width))
        return projected


def main() -> None:
    """Train the module to copy the token before, and read four times as far."""
    torch.manual_seed(0)
    table, layer, head = nn.Embedding(16, 64), Attention(64, 4, context_length=32), nn.Linear(64, 16)
    parameters = [*table.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(301):
        length = 32 if step < 300 else 128
        ids = torch.randint(16, (32, length))
        logits = head(layer(table(ids)))
        loss = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            right = (logits[:, 1:].argmax(-1) == ids[:, :-1]).float().mean()
            print(f"step {step:3d}: {length} tokens, loss {loss.item():.3f}, right {right.item():.2f}")


if __name__ == "__main__":
    main()
