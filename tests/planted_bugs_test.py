"""The table of planted bugs fits the code, and a few of them are planted.

All of them: `python tests/benchmarks/planted_bugs.py`.
"""

import ast
import dataclasses
import functools
import pathlib

import pytest

from tests.benchmarks import planted_bugs

TESTS = pathlib.Path(__file__).resolve().parent


BUGS = {bug.name: bug for bug in planted_bugs.read()}
QUICK = BUGS["printed epsilons are rounded to the nearest"]


def test_no_two_bugs_have_one_name():
  assert len(BUGS) == len(planted_bugs.read()) >= 60


@functools.cache
def names_in(path):
  tree = ast.parse((TESTS / path).read_text())
  return {getattr(node, "name", "") for node in tree.body}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_bug_has_its_place_in_the_code_and_a_test_that_is_there(bug):
  assert bug.right != bug.wrong
  compile(bug.planted(TESTS.parent), bug.file, "exec")
  assert bug.tests
  for test in bug.tests:
    path, name = test.partition("[")[0].split("::")
    assert name in names_in(path), test


def test_a_text_that_is_not_there_or_twice_is_refused():
  for right in ("no such line", "decimal"):
    bug = dataclasses.replace(QUICK, right=right)
    with pytest.raises(ValueError, match="exactly one place"):
      bug.planted(TESTS.parent)


@pytest.fixture(name="copy", scope="module")
def fixture_copy():
  if not (TESTS.parent / ".git").exists():
    pytest.skip("what git tracks is copied: this is no clone")
  with planted_bugs.copied() as root:
    yield root


@pytest.mark.slow
def test_a_planted_bug_is_caught(copy):
  bug = QUICK
  right = bug.path(copy).read_bytes()
  found = planted_bugs.caught(bug, copy)
  assert found.caught, found
  assert found.by.partition("[")[0] == bug.tests[0].split("::")[1]
  assert bug.path(copy).read_bytes() == right


@pytest.mark.slow
@pytest.mark.parametrize(
  ("wrong", "by"),
  [
    (QUICK.right, "passed"),
    ("number.rounded(last)", "broke: AttributeError"),
  ],
  ids=["no bug", "a name that is not there"],
)
def test_what_breaks_nothing_or_the_program_is_not_caught(copy, wrong, by):
  bug = dataclasses.replace(QUICK, wrong=wrong)
  found = planted_bugs.caught(bug, copy)
  assert not found.caught
  assert by in found.by
