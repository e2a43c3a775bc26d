"""Means over runs of several seeds."""

import dataclasses
import math
import shutil

import made_up
import numpy as np
import pytest

from synthq_jax import intervals
from synthq_jax.cli import main
from synthq_jax.privacy import statement
from synthq_jax.report import means
from synthq_jax.runtime import comparison_results, results
from synthq_jax.storage import artifacts


def evaluation(name, mean, *, claim=None, private=True, test_set="test"):
  scored = intervals.Interval(mean=mean, low=mean - 0.1, high=mean + 0.1)
  return results.Evaluation(
    directory=f"private/evaluate/{test_set}/{name}" if private else "evaluate",
    row=made_up.row(name), label="", test_set=test_set, private=private,
    statement=claim, measures={"nDCG@10": scored},
    num_queries=9, traps=(),
  )  # fmt: skip


def claim(seed):
  return dataclasses.replace(made_up.claim(f"finetune_dp/{seed}"), epsilon=8.0)


def write_run(root, *evaluations, settings=""):
  """Writes what a finished run leaves of its scores and settings."""
  folder = root / "private" / "compare_queries"
  folder.mkdir(parents=True)
  found = comparison_results.QueryComparison(
    directory="private/compare_queries", measures=("nDCG@10",),
    test_set="test",
    rows=tuple(comparison_results.ScoredRow(evaluation=x) for x in evaluations),
    differences=(), side_by_side=(), shareable_side_by_side=(), generators=(),
    asked=(), similarity=(),
  )  # fmt: skip
  artifacts.save(folder, found, "digest", folders=[folder])
  pages = results.Report(html="", markdown="", private_html="", table="")
  (report := root / "private" / "report").mkdir()
  artifacts.save(report, pages, "digest")
  (root / "config.gin").write_text(settings)
  return root


def test_a_row_is_the_mean_of_its_runs_with_their_spread(tmp_path, capsys):
  values = (0.30, 0.34, 0.35)
  roots = [
    write_run(
      tmp_path / str(seed),
      evaluation("bm25", 0.2),
      evaluation("synthetic_eps8", value, claim=claim(seed)),
      settings=f"# Macros:\nSEED = {seed}\nmeant.Config.seed = %SEED\n",
    )
    for seed, value in enumerate(values)
  ]
  assert main.main(["means", *map(str, roots), "--private"]) == 0
  said = capsys.readouterr().out
  assert said.startswith("PRIVATE: ")
  lines = {x.split("  ")[0]: x for x in said.splitlines()}
  assert "0.200 [0.200, 0.200]  " in lines["bm25"]
  # t(.975, 2 degrees) = 4.3027; s = .026458, by hand.
  half = 4.3027 * 0.026458 / math.sqrt(3)
  mean = np.mean(values)
  expected = f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]  "
  assert expected in lines["synthetic eps8"]
  assert lines["synthetic eps8"].endswith("0.0265")
  assert lines["synthetic eps8"].split()[2:4] == ["8", "3"]
  assert "pays the sum of their epsilons" in said


def test_private_scores_are_shown_where_they_are_asked_for_alone(tmp_path):
  roots = [
    write_run(
      tmp_path / name,
      evaluation("original", 0.9, claim=statement.non_private()),
      evaluation("public_only", value, private=False, test_set="public"),
    )
    for name, value in (("a", 0.5), ("b", 0.7))
  ]
  said = means.run(roots)
  assert "public only" in said and "0.600 [" in said
  assert "original" not in said and "PRIVATE" not in said
  assert "original" in means.run(roots, private=True)


def test_a_row_that_one_run_lacks_says_how_many_have_it(tmp_path):
  first, second = evaluation("bm25", 0.2), evaluation("untrained", 0.1)
  roots = [
    write_run(tmp_path / "a", first, second),
    write_run(tmp_path / "b", first),
  ]
  said = means.run(roots, private=True).splitlines()
  [line] = [x for x in said if x.startswith("untrained")]
  assert line.split() == ["untrained", "-", "1", "0.100", "-"]


def test_what_is_no_repetition_is_refused(tmp_path):
  row = evaluation("bm25", 0.2)
  first = write_run(tmp_path / "a", row, settings="EPSILON = 8\nSEED = 0\n")
  other = write_run(tmp_path / "b", row, settings="EPSILON = 3\nSEED = 1\n")
  with pytest.raises(ValueError, match="other values of EPSILON"):
    means.run([first, other], private=True)
  with pytest.raises(ValueError, match="two or more different runs"):
    means.run([first, tmp_path / "b" / ".." / "a"], private=True)
  with pytest.raises(ValueError, match="two or more different runs"):
    means.run([first], private=True)
  third = write_run(tmp_path / "c", row, settings="EPSILON = 8\nSEED = 2\n")
  assert means.run([first, third], private=True)
  # Its config.gin is of the settings that it was interrupted with.
  (third / "private/report" / artifacts.RESULT_NAME).unlink()
  with pytest.raises(ValueError, match="directory of a finished run"):
    means.run([first, third], private=True)
  with pytest.raises(ValueError, match=r"c: expected .* finished run"):
    means.run([first, tmp_path / "c"], private=True)
  (other / "config.gin").write_text("EPSILON = 8\nSEED = 1\n")
  with pytest.raises(ValueError, match="--private shows"):
    means.run([first, other])


def test_one_draw_of_noise_is_no_repetition(finished_run, tmp_path):
  """A fixed secret trains the same generator under every seed."""
  root = finished_run.root
  for place in ("private/compare_queries", "private/report"):
    shutil.copytree(root / place, tmp_path / place)
  with pytest.raises(ValueError, match="leave SECRET_SEED out"):
    means.run([root, tmp_path], private=True)
