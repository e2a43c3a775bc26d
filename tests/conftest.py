"""Test setup: 8 virtual CPU devices, silent rank promotion is an error.

Files that take minutes begin first, so that no worker is left alone with one at
the end (with --no-loadscope-reorder, as launch/local.sh says).

Workers, and the processes that tests start, share what they have compiled in a
folder that ends with the tests.
"""

import gc
import os
import pathlib
import shutil
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    # Most of a test's time is compiling: these make it three times as fast.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
  )
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _OWN_CACHE:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

_LONG = (
  "pipeline/hosts_test.py",
  "pipeline/kill_test.py",
  "pipeline/plan_test.py",
  "pipeline/neighbours_test.py",
  "tutorials_test.py",
  "training/mesh_test.py",
  "pipeline/direct_dp_test.py",
  "optim/t5_parity_test.py",
  "studies/federated_test.py",
  "pipeline/adapters_test.py",
  "data/tfds_beir_test.py",
)


def pytest_collection_modifyitems(items):
  tests = pathlib.Path(__file__).parent
  places = {tests / name: place for place, name in enumerate(_LONG)}
  items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_unconfigure():
  if _OWN_CACHE:
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _forget():
  """Drops compiled programs with their module: a worker would keep 6 GiB."""
  yield
  jax.clear_caches()
  gc.collect()
