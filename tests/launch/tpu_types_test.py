"""What the types of Cloud TPU consist of, against Google's tables."""

import math

import pytest

import tpu_types

# Accelerator, topology, chips, hosts, devices that JAX sees.
TABLE = [
  ("v3-32", "", 16, 4, 32),
  ("v4-8", "2x2x1", 4, 1, 4),
  ("v4-32", "2x2x4", 16, 4, 16),
  ("v4-4x4x12", "4x4x12", 192, 48, 192),
  ("v5litepod-8", "2x4", 8, 1, 8),
  ("v5litepod-16", "4x4", 16, 4, 16),
  ("v5p-12288", "16x16x24", 6144, 1536, 6144),
  ("v5p-2x2x2", "2x2x2", 8, 2, 8),
  ("v6e-64", "8x8", 64, 16, 64),
]


@pytest.mark.parametrize(
  ("accelerator", "topology", "chips", "hosts", "devices"), TABLE
)
def test_a_type_is_what_googles_tables_say(
  accelerator, topology, chips, hosts, devices
):
  found = tpu_types.describe(accelerator)
  assert found.topology == topology
  assert (found.chips, found.hosts, found.devices) == (chips, hosts, devices)
  assert bool(found.gke) == bool(topology)


def test_every_topology_has_the_chips_that_it_stands_for():
  for name, kind in tpu_types._KINDS.items():
    for chips, topology in kind.topologies.items():
      if topology:
        assert math.prod(map(int, topology.split("x"))) == chips, name
