"""Test setup: 8 virtual CPU devices, silent rank promotion is an error."""

import gc
import os

os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # most of a test's time is compiling
  )
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _forget():
  """Drops compiled programs with their module: a worker would keep 6 GiB."""
  yield
  jax.clear_caches()
  gc.collect()
