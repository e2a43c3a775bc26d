#!/bin/sh
# faiss-cpu==1.15.1
#
# Of documents with one score, IndexFlatIP keeps the first k and returns them
# backwards: the best of k=10 is document 9, the best of k=100 is document 99.
#
# Why it surprises: a flat index is exact, and a prefix of a longer result
# should be the shorter result. Here no document of the two first tens is the
# same.
#
# Whom it hurts: nDCG@10 of collections with duplicate passages: it depends on
# how deep the run is.
#
# Source: faiss/impl/ResultHandler.h, HeapBlockResultHandler; faiss/utils/Heap.h,
# heap_reorder.
#
# Seen: k=10 starts 9 8 7, k=100 starts 99 98 97
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import faiss
import numpy as np

index = faiss.IndexFlatIP(8)
index.add(np.ones((300, 8), np.float32))
short, long = (
  index.search(np.ones((1, 8), np.float32), k)[1][0, :10].tolist()
  for k in (10, 100)
)
print("k=10 starts", *short[:3], "k=100 starts", *long[:3])
if short != list(range(9, -1, -1)) or long != list(range(99, 89, -1)):
  raise SystemExit("changed: equal scores stand in another order")
END
"$work/env/bin/python" program.py
