"""What a worker of a slice knows of itself, and what xm.py makes of it."""

import http.server
import pathlib
import threading

import pytest
import small_data

import tpu_worker
import xm

TINY = "--gin_file=gin_configs/recipes/demo_tiny.gin"
# As the metadata server of a v4-32 writes it.
RECORDED = """\
ACCELERATOR_TYPE: 'v4-32'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
CONSUMER_PROJECT_ID: 'my-project'
HOST_BOUNDS: '1,1,4'
NODE_ID: 'ours'
RUNTIME_VERSION: 'tpu-ubuntu2204-base'
WORKER_ID: '0'
ZONE: 'us-central2-b'
"""
FOUR = tpu_worker.Worker(slice="ours", accelerator="v4-32", hosts=4)
ONE = tpu_worker.Worker(slice="ours", accelerator="v4-8", hosts=1)


@pytest.fixture(name="metadata")
def _metadata(monkeypatch, tmp_path):
  """A metadata server with what one was recorded to say, and a TPU's device."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
      right = self.headers["Metadata-Flavor"] == "Google"
      is_known = self.path == tpu_worker._PATH
      self.send_response(200 if right and is_known else 403)
      self.end_headers()
      self.wfile.write(RECORDED.encode())

    def log_message(self, *args):
      pass

  server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  device = tmp_path / "accel0"
  device.touch()
  monkeypatch.setattr(tpu_worker, "_DEVICES", (str(device),))
  yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
  server.shutdown()
  server.server_close()


def test_a_worker_asks_its_metadata_server(metadata):
  assert tpu_worker.find(metadata) == FOUR


def test_a_pod_has_it_in_its_environment():
  names = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_ACCELERATOR_TYPE": "v6e-8"}
  found = tpu_worker.find(names)
  assert (found.hosts, found.accelerator) == (2, "v6e-8")


def test_a_machine_without_devices_asks_nobody(metadata, monkeypatch):
  monkeypatch.setattr(tpu_worker, "_DEVICES", ("/nonexistent",))
  monkeypatch.setattr(
    tpu_worker.urllib.request, "urlopen", lambda *a, **k: 1 / 0
  )
  assert tpu_worker.find(metadata) is None


def units(monkeypatch, worker, *flags):
  monkeypatch.setattr(tpu_worker, "find", lambda: worker)
  argv = [TINY, *flags]
  split, bindings = xm.tpu_vm.split(argv)
  return xm.units(xm._parser().parse_args(split), bindings, argv)


@pytest.mark.parametrize("flags", [(), ("--executor=local",)])
def test_a_worker_runs_one_process_of_its_slice(monkeypatch, capsys, flags):
  """Never one of four alone."""
  (unit,) = units(monkeypatch, FOUR, *flags)
  assert "--distributed=tpu" in unit.args
  said = capsys.readouterr().err
  assert (
    "a worker of ours, 4 hosts: the same command has to run on each" in said
  )
  (unit,) = units(monkeypatch, ONE, *flags)
  assert "--distributed=tpu" in unit.args
  assert capsys.readouterr().err == ""
  (unit,) = units(monkeypatch, None, *flags)
  assert "--distributed=tpu" not in unit.args


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--stage=study"], "--stage=study works in one process"),
    (["--max_parallel=2"], "ours runs units one after the other"),
  ],
)
def test_what_a_slice_cannot_do_is_refused(monkeypatch, flags, words):
  with pytest.raises(ValueError, match=words):
    units(monkeypatch, FOUR, *flags)


def test_one_slice_runs_one_unit_at_a_time(cloud, capsys):
  flags = [*cloud.flags, "--executor=tpu_vm", "--attach=ours"]
  assert xm.main([*flags, "--max_parallel=2", "--sweep=EPSILON=3,8"]) == 2
  assert "--attach=ours is one slice" in capsys.readouterr().err
  assert cloud.kinds == []


def test_units_of_a_sweep_share_prepared_data(monkeypatch, tmp_path):
  flags = ["--sweep=EPSILON=3,8", f"--workdir={tmp_path}"]
  shared = f"--gin.prepare_data.Config.shared_in='{tmp_path}/private/prepared'"
  both = units(monkeypatch, None, *flags)
  assert [unit.name for unit in both] == ["epsilon-3", "epsilon-8"]
  assert all(shared in unit.args for unit in both)
  first, *rest = units(monkeypatch, None, *flags, "--max_parallel=2")
  assert first.first and not any(unit.first for unit in rest)
  assert first.args[2] == "prepare_data"
  assert first.args[-1] == rest[0].args[-1] == f"--workdir={tmp_path}/epsilon-3"
  assert len(rest) == 2
  (alone,) = units(monkeypatch, None, f"--workdir={tmp_path}")
  assert not any("shared_in" in word for word in alone.args)
  own = "--gin.prepare_data.Config.shared_in='/elsewhere'"
  for unit in units(monkeypatch, None, *flags, own):
    assert [w for w in unit.args if "shared_in" in w] == [own]


def test_synthq_understands_where_data_is_shared(monkeypatch, tmp_path):
  """Two units of a small log, as xm.py would run them, prepare once."""
  from synthq_jax.cli import main

  flags = ["--sweep=EPSILON=3,8", "--stage=prepare_data"]
  source = small_data.write_pairs(tmp_path / "log.jsonl", 40)
  flags += [f"--gin.SOURCE={source}", "--gin.NUM_DOCUMENTS=8"]
  flags.append("--gin.prepare_data.Config.public_test_documents=20")
  both = units(monkeypatch, None, *flags, f"--workdir={tmp_path}")
  root = pathlib.Path(__file__).resolve().parents[2]
  monkeypatch.chdir(root)
  for unit in both:
    assert main.main(list(unit.args[2:])) == 0
  (copy,) = (tmp_path / "private/prepared").iterdir()
  assert (copy / "result.json").exists()
