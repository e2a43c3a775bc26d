#!/bin/sh
# tensorstore==0.1.86
#
# A zarr array of five numbers that is resized to two and then to five again
# has its old numbers 3, 4, 5 back if they lie in a chunk that the shorter
# array still reaches. With chunks of two they are zeros.
#
# Why it surprises: resizing deletes the chunks that lie outside, and the
# documentation of the shape says that new elements have the fill value. What
# is left depends on the chunk size alone.
#
# Whom it hurts: a table of records that is cut (a withdrawn user, a crashed
# writer's tail) and grown again: the cut rows are rows again.
#
# Source: tensorstore, TensorStore.resize; drivers zarr and zarr3.
#
# Seen: chunks of 8: [1, 2, 3, 4, 5], chunks of 2: [1, 2, 0, 0, 0], in zarr
# and zarr3
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet tensorstore==0.1.86 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import numpy as np
import tensorstore as ts


def regrown(driver, chunk):
  grid = {"name": "regular", "configuration": {"chunk_shape": [chunk]}}
  layout = {"chunks": [chunk]} if driver == "zarr" else {"chunk_grid": grid}
  spec = {"driver": driver, "kvstore": {"driver": "memory"}, "metadata": layout}
  store = ts.open(spec, dtype=ts.int32, shape=[5], create=True).result()
  store.write(np.arange(1, 6, dtype=np.int32)).result()
  short = store.resize(exclusive_max=[2]).result()
  return short.resize(exclusive_max=[5]).result().read().result().tolist()


seen = {(d, c): regrown(d, c) for d in ("zarr", "zarr3") for c in (8, 2)}
print(*(f"{d}, chunks of {c}: {rows}" for (d, c), rows in seen.items()), sep="; ")
kept, gone = [1, 2, 3, 4, 5], [1, 2, 0, 0, 0]
if [*seen.values()] != [kept, gone, kept, gone]:
  raise SystemExit("changed: the numbers that were cut are treated otherwise")
END
"$work/env/bin/python" program.py
