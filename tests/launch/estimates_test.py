"""What is known not to fit, and the least time of a step."""

import json

import pytest

import estimates
import tpu_vm

CASE = {
  "model": "t5_1_0_3B", "topology": "v4:2x2x4", "mesh": [16, 1, 1],
  "microbatch": 1, "remat": True,
}  # fmt: skip
ROW = {"tflop": 10.0, "tflop_passes": 11.0}


@pytest.fixture(name="table")
def _table(tmp_path, monkeypatch):
  """Writes a table of one case, and lets everybody read it."""

  def write(row, case=CASE):
    content = {
      "rows": 1024,
      "limits": {"peak_gib": 30.75},
      "settings": {"one": case},
      "cases": {"one": {"bookkeeping": {**ROW, **row}}},
    }
    path = tmp_path / "2026-01-01_tpu_v4.json"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(estimates, "DATA", tmp_path)

  return write


def _step(**changes) -> estimates.Step:
  settings = {
    "model": "t5_1_0_3B", "way": "bookkeeping", "remat": True, "mesh": (16, 1, 1),
    "microbatch": 1, "rows": 1024,
  }  # fmt: skip
  return estimates.Step(**{**settings, **changes})


@pytest.mark.parametrize("row", [{"fits": False}, {"peak_gib": 32.62}])
def test_what_needs_at_least_as_much_does_not_fit_either(table, row):
  table(row)
  for same in ({}, {"microbatch": 2}, {"mesh": (8, 1, 1)}):
    assert "does not fit" in estimates.refusal(_step(**same))
  for other in (
    {"mesh": (4, 4, 1)},
    {"mesh": (8, 1, 2)},
    {"way": "vmap"},
    {"remat": False},
    {"model": "t5_1_0_large"},
  ):
    assert not estimates.refusal(_step(**other)), other


def test_steps_of_all_tables_are_known(table, tmp_path):
  """Those of T5 1.0 Small and Base were counted after the others."""
  table({})
  base = {**CASE, "model": "t5_1_0_base"}
  old = json.loads((tmp_path / "2026-01-01_tpu_v4.json").read_text())
  old["cases"]["one"]["bookkeeping"]["tflop_passes"] = (
    22.0  # until counted anew
  )
  old["settings"]["two"], old["cases"]["two"] = base, old["cases"]["one"]
  (tmp_path / "2025-01-01_tpu_v4_more.json").write_text(json.dumps(old))
  known = {step.model: row["tflop_passes"] for step, row in estimates.known()}
  assert known == {"t5_1_0_3B": 11.0, "t5_1_0_base": 22.0}


def test_what_fitted_is_not_refused(table):
  table({"fits": True, "peak_gib": 24.5})
  assert not estimates.refusal(_step())


def test_a_recipe_that_does_not_fit_is_refused_before_money_flows(
  table, cloud, capsys
):
  table({"fits": False})
  flags = [
    "--accelerator=v4-32", "--zone=z", "--project=p", "--bucket=my-bucket",
    "--private_in_bucket", f"--source={cloud.checkout}", "--dry_run",
    "--gin_file=gin_configs/recipes/paper_t5_xl.gin",
    "--gin.SOURCE=msmarco:m", "--gin.CHECKPOINT=c", "--gin.VOCABULARY=v",
    "--gin.ENCODER=r",
  ]  # fmt: skip
  assert tpu_vm.main([*flags, "--gin.MESH_FSDP=1"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "does not fit: t5_1_0_3B" in line and "raise MESH_FSDP" in line
  assert tpu_vm.main([*flags, "--gin.MESH_FSDP=4"]) == 0
  printed = capsys.readouterr().out
  assert "# estimated, not measured: a private step takes 0.04 s" in printed


def test_time_is_work_over_the_peak_rate(table):
  table({})
  chip = estimates.Chip(tflops=100, memory_gb=1, links_gb=1)
  assert estimates.of_step(_step(), chip) == pytest.approx(0.11)
  # Half of the devices have twice the rows each.
  half = _step(mesh=(8, 1, 1))
  assert estimates.of_step(half, chip) == pytest.approx(0.22)
  assert estimates.of_step(_step(model="t5_1_1_xl"), chip) is None


def test_state_and_sums_take_their_time():
  chip = estimates.Chip(tflops=1, memory_gb=1, links_gb=1)
  mib = {"all-reduce": 1e9 / 2**20, "all-gather": 1e9 / 2**20}
  assert estimates.seconds(
    chip, tflop=1, state_gib=1e9 / 2**30, collectives_mib=mib
  ) == pytest.approx(1 + 2 + 2 + 1)
  scattered = {"reduce-scatter": 1e9 / 2**20}
  assert estimates.seconds(
    chip, tflop=0, collectives_mib=scattered, ways=4
  ) == pytest.approx(4)


def test_the_table_of_this_project_has_an_estimate_for_every_chip(capsys):
  assert estimates.main() == 0
  _, header, *lines = capsys.readouterr().out.splitlines()
  assert header.split() == list(estimates.CHIPS)
  assert lines
  for line in lines:
    times = [float(word) for word in line.split()[-len(estimates.CHIPS) :]]
    assert all(time > 0 for time in times)
