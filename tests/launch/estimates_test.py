"""The least time of a step."""

import json

import pytest

import estimates

CASE = {
  "model": "t5_1_0_3B", "topology": "v4:2x2x4", "mesh": [16, 1, 1],
  "microbatch": 1, "remat": True,
}  # fmt: skip


def test_steps_of_all_tables_are_known(tmp_path, monkeypatch):
  """Those of T5 1.0 Small and Base were counted after the others."""
  monkeypatch.setattr(estimates, "DATA", tmp_path)
  table = {
    "rows": 1024,
    "settings": {"one": CASE, "two": {**CASE, "model": "t5_1_0_base"}},
    "cases": {
      name: {"vmap": {"tflop_passes": 22.0}} for name in ("one", "two")
    },
  }
  (tmp_path / "2025-01-01_tpu_v4_more.json").write_text(json.dumps(table))
  table["cases"] = {"one": {"vmap": {"tflop_passes": 11.0}}}  # counted anew
  (tmp_path / "2026-01-01_tpu_v4.json").write_text(json.dumps(table))
  known = estimates.known().values()
  assert [row["tflop_passes"] for row, _ in known] == [11.0, 22.0]


def test_work_state_and_sums_take_their_time():
  chip = estimates.Chip(tflops=1, memory_gb=1, links_gb=1)
  mib = {"all-reduce": 1e9 / 2**20, "all-gather": 1e9 / 2**20}
  assert estimates.seconds(
    chip, tflop=1, state_gib=1e9 / 2**30, collectives_mib=mib, ways=1
  ) == pytest.approx(1 + 2 + 2 + 1)
  scattered = {"reduce-scatter": 1e9 / 2**20}
  assert estimates.seconds(
    chip, tflop=0, state_gib=0, collectives_mib=scattered, ways=4
  ) == pytest.approx(4)


def test_the_table_of_this_project_has_an_estimate_for_every_chip(capsys):
  assert estimates.main() == 0
  _, header, *lines = capsys.readouterr().out.splitlines()
  assert header.split() == list(estimates.CHIPS)
  assert lines
  for line in lines:
    times = [float(word) for word in line.split()[-len(estimates.CHIPS) :]]
    assert all(time > 0 for time in times)
