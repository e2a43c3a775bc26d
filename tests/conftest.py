"""Test setup: 8 virtual CPU devices, silent rank promotion is an error.

Without tests that are marked `slow`, the suite takes 4 minutes of two cores. Files that
take long begin first, so that no worker is left alone with one at the end (with
--no-loadscope-reorder, as launch/local.sh says).

Workers, and the processes that tests start, share what they have compiled and
one finished run, in a folder that ends with the tests. Compiled programs stay where
JAX_COMPILATION_CACHE_DIR says so.
"""

import gc
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile

import quick_xla

os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    *quick_xla.FLAGS,  # most of a test's time is compiling
    # Else devices that other work starves for 40 s take the worker with them.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
  )
)
# XLA gives 8 devices 8 threads, unless NPROC says more. One that waits in two gathers
# at once takes two, the last device got none, and one training in forty never ended.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
for _hub in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # nothing is downloaded
  os.environ.setdefault(_hub, "1")
# Tests write thousands of small files: in memory they wait for no disk, which is a
# third of the time of some. Containers often have 64 MB there: too little.
_MEMORY, _ENOUGH = "/dev/shm", 8 << 30
if os.path.isdir(_MEMORY) and shutil.disk_usage(_MEMORY).free >= _ENOUGH:
  os.environ.setdefault("TMPDIR", _MEMORY)
  tempfile.tempdir = None  # read anew
_FOLDER = "SYNTHQ_TESTS_FOLDER"  # which workers get from who started them
_IS_FIRST = _FOLDER not in os.environ
if _IS_FIRST:
  os.environ[_FOLDER] = tempfile.mkdtemp(prefix="tests-")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # for the tree: not here
  os.environ["PYTHONPYCACHEPREFIX"] = f"{os.environ[_FOLDER]}/bytecode"
  sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
  sys.dont_write_bytecode = False
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", f"{os.environ[_FOLDER]}/compiled"
)
# Small programs, too: modules that forget them find half of their time again.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# No test cuts the power, and waiting for the disk is a twentieth of the time.
os.fsync = lambda descriptor: None

# Behind TensorFlow, the import of Triton (of PyTorch for GPUs) ends the process:
# triton 3.7.1, tensorflow 2.21.
if importlib.util.find_spec("triton"):
  import triton  # noqa: F401

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

_SLOW = (
  # Processes, kills, hosts, tutorials and whole runs.
  "stages/plan_test.py",
  "runtime/campaign_test.py",
  "runtime/hosts_test.py",
  "runtime/store_kill_test.py",
  "runtime/neighbours_test.py",
  "tutorials_test.py",
  "examples_test.py",
  "training/mesh_test.py",
  "training/hosts_test.py",
  "optim/contrastive_networks_test.py",
  "optim/t5_parity_test.py",
  "studies/federated_test.py",
  "data/tfds_beir_test.py",
  "launch/tpu_driver_test.py",
  "launch/processes_test.py",
  "launch/xm_test.py",
  # Trainings, sweeps of attacks, statistics, recipes and other libraries.
  "audit/inversion_test.py",
  "audit/lower_bounds_test.py",
  "audit/private_step_test.py",
  "data/feature_converters_test.py",
  "data/task_records_test.py",
  "data/tasks_test.py",
  "data/vocabulary_test.py",
  "federated/shared_data_test.py",
  "fuzz_test.py",
  "generation/decoding_test.py",
  "generation/samplers_test.py",
  "leakage/rerankers/learning_test.py",
  "leakage/rerankers/mono_test.py",
  "leakage/rerankers/reranker_test.py",
  "leakage/rerankers/training_test.py",
  "models/bert_test.py",
  "models/image_encoders_test.py",
  "models/scanned_test.py",
  "models/sentence_encoder_test.py",
  "models/t5_transformers_test.py",
  "optim/by_length_test.py",
  "optim/contrastive_devices_test.py",
  "optim/contrastive_misuse_test.py",
  "optim/contrastive_neighbours_test.py",
  "optim/contrastive_rounding_test.py",
  "optim/layers_test.py",
  "optim/pair_norms_test.py",
  "privacy/mixtures_test.py",
  "privacy/user_claims_test.py",
  "red_team/attacks_test.py",
  "report/browser_test.py",
  "runtime/bad_input_test.py",
  "runtime/claims_test.py",
  "runtime/hostile_collections_test.py",
  "runtime/private_training_test.py",
  "runtime/released_results_test.py",
  "stages/audit_test.py",
  "stages/direct_dp_test.py",
  "stages/finetune_dp_test.py",
  "stages/learn_to_rank_test.py",
  "stages/paper_recipes_test.py",
  "stages/release_scores_test.py",
  "stages/users_test.py",
  "stages/vocabularies_test.py",
  "storage/stores_test.py",
  "studies/images_test.py",
  "studies/planted_leakage_test.py",
  "tools/export_elsewhere_test.py",
  "tools/export_ranker_test.py",
  "training/contrastive_mesh_test.py",
  "training/pairs_test.py",
)
"""Files that take more than five seconds, or load a large library. So are tests that
read the shared run, and those that say so. The longest begin first."""
_LONG = (
  *_SLOW,
  "training/sharded_grad_test.py",
  "optim/contrastive_test.py",
  "data/environment_docs_test.py",
  "packaging_test.py",
)
"""Begin first; of what is not slow as a whole, some tests say that they are."""


def pytest_collection_modifyitems(items):
  tests = pathlib.Path(__file__).parent
  places = {tests / name: place for place, name in enumerate(_LONG)}
  slow = {tests / name for name in _SLOW}
  for item in items:
    if item.path in slow or "finished_run" in getattr(item, "fixturenames", ()):
      item.add_marker(pytest.mark.slow)
  items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
  """What tests have imported stays: no collection looks at it again.

  Collections are as rare as in the command line, which trees of code profit from.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)


def pytest_unconfigure():
  if _IS_FIRST:
    shutil.rmtree(os.environ[_FOLDER], ignore_errors=True)


@pytest.fixture(name="finished_run", scope="module")
def _finished_run():
  """A run of every stage that all tests share: to be read, or copied."""
  import finished_runs

  run = finished_runs.shared(f"{os.environ[_FOLDER]}/finished")
  before = finished_runs.state(run)
  yield run
  changed = {
    name for name, _ in before.items() ^ finished_runs.state(run).items()
  }
  assert not changed, "the shared run was changed"


@pytest.fixture(autouse=True, scope="module")
def _forget():
  """Drops compiled programs with their module: a worker would keep 6 GiB."""
  yield
  jax.clear_caches()
  gc.collect()
