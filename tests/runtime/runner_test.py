"""What the runner says while it makes results."""

import contextlib
import re
import types

import pytest

from synthq_jax.runtime import fingerprints, rows, runner, workspace


@pytest.mark.parametrize("is_there", [False, True])
def test_each_result_has_a_line_when_it_begins_and_one_with_its_time(
  is_there, tmp_path, monkeypatch
):
  lines, made = [], []
  space = workspace.Workspace(tmp_path, 7)
  one = types.SimpleNamespace(
    name="generate", folder="", result=int, needs_secret=False, together=False,
    make=lambda task, saves: made.append((task.result_path, saves)),
  )  # fmt: skip
  job = types.SimpleNamespace(
    row=None, depends=(), settings=None, inputs={}, is_private=False
  )
  plan = rows.Plan(config=None, stages=())
  run = runner.Run(plan, space, [one], say=lines.append)
  monkeypatch.setattr(run, "_is_there", lambda *_: is_there)
  monkeypatch.setattr(run, "_load", lambda *_: 3)
  monkeypatch.setattr(fingerprints, "of_result", lambda digest, value: digest)
  assert run.make(one, "eps8", job).value == 3
  if is_there:
    assert lines == ["[generate/eps8] finished earlier, skipped"] and not made
    return
  first, last = lines
  assert first == "[generate/eps8] running" and made == [
    ("generate/eps8", True)
  ]
  assert re.fullmatch(r"\[generate/eps8\] done in \d+\.\d s", last)


@pytest.mark.parametrize("is_there", [False, True])
def test_no_page_of_earlier_results_outlives_a_run_that_is_interrupted(
  is_there, tmp_path, monkeypatch
):
  """Its joint claim left out what the interrupted run had trained."""
  pages = [tmp_path / name for name in ("report", "private/report")]
  for folder in pages:
    folder.mkdir(parents=True)
    (folder / "report.md").write_text("epsilon 8.08, all releases together")

  def interrupt(task, saves):
    raise KeyboardInterrupt

  one = types.SimpleNamespace(
    name="finetune_dp", folder="", result=int, needs_secret=False,
    together=False, make=interrupt,
  )  # fmt: skip
  job = types.SimpleNamespace(row=None, depends=(), settings=None, inputs={})
  run = runner.Run(
    rows.Plan(config=None, stages=()),
    workspace.Workspace(tmp_path, 7),
    [one],
    say=lambda _: None,
  )
  monkeypatch.setattr(run, "_is_there", lambda *_: is_there)
  monkeypatch.setattr(run, "_load", lambda *_: 3)
  with (
    contextlib.nullcontext() if is_there else pytest.raises(KeyboardInterrupt)
  ):
    run.make(one, "eps3", job)
  assert all(folder.exists() == is_there for folder in pages)
