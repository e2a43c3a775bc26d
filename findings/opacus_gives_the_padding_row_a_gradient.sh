#!/bin/sh
# opacus==1.6.0, torch==2.13.0
#
# nn.Embedding(padding_idx=0) has no gradient for row 0 in PyTorch. Wrapped in
# GradSampleModule, the per-example gradients have one, and it counts in the
# norm: an example of one word and three paddings has norm 4.47 instead of
# 1.41.
#
# Why it surprises: the wrapped module still says padding_idx=0, and its
# summed p.grad is right; only what DP-SGD uses differs. With Opacus's
# clipping a short text is scaled down by its padding, and the padding row is
# trained and noised.
#
# Whom it hurts: private training of text encoders with padded batches.
#
# Source: opacus/grad_sample/embedding.py, compute_embedding_grad_sample.
#
# Seen: PyTorch's row 0: 0.0 0.0, Opacus's row 0: 3.0 3.0; norms 1.41 and 4.47
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 opacus==1.6.0
cd "$work"
cat > program.py <<'END'
import torch
from opacus.grad_sample import GradSampleModule

table = torch.nn.Embedding(5, 2, padding_idx=0)
texts = torch.tensor([[1, 0, 0, 0]])
table(texts).sum().backward()
expected = table.weight.grad.clone()
table.zero_grad()
private = GradSampleModule(table, loss_reduction="sum")
private(texts).sum().backward()
sample = table.weight.grad_sample[0]
print("PyTorch's row 0:", *expected[0].tolist())
print("Opacus's row 0:", *sample[0].tolist())
print(f"norms {expected.norm():.2f} and {sample.norm():.2f}")
if expected[0].any() or sample[0].tolist() != [3.0, 3.0]:
  raise SystemExit("changed: the padding row has no gradient")
END
"$work/env/bin/python" program.py
