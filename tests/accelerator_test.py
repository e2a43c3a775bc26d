"""The benchmark for accelerators, at tiny shapes on a CPU."""

import json
import types

import accelerator
import pytest


@pytest.fixture(name="here", autouse=True)
def _here(monkeypatch):
  """Measures in this process: a new one takes seconds to import."""
  monkeypatch.setattr(
    accelerator.measuring, "in_own_process", lambda call, *given: call(*given)
  )
  said: list[str] = []
  monkeypatch.setattr(
    accelerator.measuring, "say", lambda *words: said.append(str(words[0]))
  )
  return said


@pytest.mark.parametrize("most", [1, 4, 512])
def test_bisection_finds_the_largest_power_of_two(most):
  for limit in (0, 1, 3, 4, 300, 512, 1000):
    asked = []

    def fits(size, limit=limit, asked=asked):
      asked.append(size)
      return size <= limit

    powers = [2**k for k in range(10) if 2**k <= min(limit, most)]
    assert accelerator.largest(fits, most) == max(powers, default=0)
    assert len(asked) <= 4


def test_what_the_time_is_too_short_for_is_left(tmp_path, monkeypatch, here):
  monkeypatch.setattr(accelerator, "measure", lambda case, tiny: {"seconds": 1})
  times = iter([0.0, 0.0, 0.0, 300.0, 350.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(times))
  monkeypatch.setattr(accelerator, "time", clock)
  path = tmp_path / "out.json"
  flags = ["--tiny", "--seconds=600", f"--output={path}", "--cases"]
  assert accelerator.main([*flags, "noise", "sampling"]) == 0
  assert list(json.loads(path.read_text())["cases"]) == ["noise"]
  assert "sampling: left to the next call" in here


def test_results_of_another_machine_are_not_mixed(tmp_path, capsys):
  path = tmp_path / "out.json"
  other = {"device": "TPU v4", "tiny": True, "cases": {}}
  path.write_text(json.dumps(other))
  with pytest.raises(SystemExit):
    accelerator.main(["--tiny", f"--output={path}"])
  assert "of another device" in capsys.readouterr().err
