#!/bin/sh
# grain==0.2.18
#
# A grain DataLoader over ten records in batches of four gives 4, 4, 2 records
# with no worker, 4, 4, 1, 1 with two and 4, 3, 3 with three. With
# drop_remainder the three workers deliver four records of ten. The order
# differs, too.
#
# Why it surprises: the batch is an operation of the pipeline and the sampler
# has a seed, so the number of processes should change the speed alone. Each
# worker batches its own every n-th record.
#
# Whom it hurts: batch sizes that a training or its accounting relies on,
# small evaluation sets, runs that go on with another number of workers.
#
# Source: grain/_src/python/data_loader.py, DataLoader; operations run in each
# worker.
#
# Seen: 0: [4, 4, 2] 2: [4, 4, 1, 1] 3: [4, 3, 3]; records left with
# drop_remainder: 8 8 4
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet grain==0.2.18
cd "$work"
cat > program.py <<'END'
import sys

import grain
from absl import flags


class Numbers:
  def __len__(self):
    return 10

  def __getitem__(self, index):
    return int(index)


def load(workers, drop):
  sampler = grain.samplers.IndexSampler(
    10, shuffle=True, seed=0, num_epochs=1,
    shard_options=grain.sharding.NoSharding(),
  )
  batch = grain.transforms.Batch(4, drop_remainder=drop)
  loader = grain.DataLoader(
    data_source=Numbers(), sampler=sampler, operations=[batch],
    worker_count=workers,
  )
  return [len(rows) for rows in loader]


if __name__ == "__main__":
  flags.FLAGS(sys.argv[:1])
  sizes = {workers: load(workers, drop=False) for workers in (0, 2, 3)}
  left = [sum(load(workers, drop=True)) for workers in (0, 2, 3)]
  print(*(f"{workers}: {rows}" for workers, rows in sizes.items()))
  print("records left with drop_remainder:", *left)
  if sizes != {0: [4, 4, 2], 2: [4, 4, 1, 1], 3: [4, 3, 3]} or left != [8, 8, 4]:
    raise SystemExit("changed: workers batch otherwise")
END
"$work/env/bin/python" program.py
