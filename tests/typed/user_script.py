"""A user's script, which type checkers read."""

import torch

import wellposed as wp

model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
handle = wp.constrain_(model, optimizer, where=("query", "key"))
penalty = wp.OrthogonalityPenalty(model, value=1e-2)
loss: torch.Tensor = model(torch.randn(2, 3, 16)).square().mean() + penalty()
loss.backward()
optimizer.step()
worst: float = handle.error().worst
table: str = wp.measure(model).table()
bound: float = wp.certify(wp.nn.L2SelfAttention(16, 2), seq_len=4).total
monitor = wp.Monitor(model, optimizer, every=2)
numbers: dict[str, float] = monitor.step()
monitor.remove()
