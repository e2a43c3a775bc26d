from synthq_jax.data import docstrings

TWO = '"""First here.\n\n  Second here.\n  """'


def read(package="fake_docs"):
  return list(docstrings.read(package))


def names():
  return [entry.name for entry in read()]


def test_public_modules_classes_and_functions_are_read(install):
  install(
    "fake_docs",
    {
      "shapes.py": f"""{TWO}
class Square:
  {TWO}

  def area(self):
    {TWO}

async def draw():
  {TWO}
""",
      "deep/er.py": f"def inner():\n  {TWO}\n",
    },
  )
  entries = read()
  assert [entry.name for entry in entries] == [
    "fake_docs.deep.er.inner",
    "fake_docs.shapes",
    "fake_docs.shapes.Square",
    "fake_docs.shapes.draw",
    "fake_docs.shapes.Square.area",
  ]
  assert {(e.package, e.first, e.rest) for e in entries} == {
    ("fake_docs", "First here.", "Second here.")
  }


def test_private_names_and_what_stands_in_them_are_left_out(install):
  install(
    "fake_docs",
    {
      "shapes.py": f"""
def _hidden():
  {TWO}

class _Hidden:
  def area(self):
    {TWO}

class Seen:
  {TWO}

  def __len__(self):
    {TWO}
"""
    },
  )
  assert names() == ["fake_docs.shapes.Seen"]


def test_tests_and_vendored_code_are_skipped_but_not_names_alike(install):
  paths = (
    "tests/a.py",
    "test/a.py",
    "deep/tests/a.py",
    "test_a.py",
    "a_test.py",
    "testing/a.py",
    "_vendor/a.py",
    "third_party/a.py",
    "latest.py",
    "contest/a.py",
    "testament.py",
  )
  install("fake_docs", dict.fromkeys(paths, f"def f():\n  {TWO}\n"))
  assert names() == [
    "fake_docs.contest.a.f",
    "fake_docs.latest.f",
    "fake_docs.testament.f",
  ]


def test_markup_is_cleaned_out_of_both_parts(install):
  install(
    "fake_docs",
    {
      "marked.py": '''
def f():
  """Return the :func:`sorted <builtins.sorted>` *values*
  of ``x``.

  Parameters
  ----------
  x : list
    The `numbers`.

  .. deprecated:: 1.2
  :returns: something
  >>> f(1)
  ... # more
  See `the guide <https://example.org>`_ for 2 * 3 and **bold** text_ here.
  """
'''
    },
  )
  (entry,) = read()
  assert entry.first == "Return the sorted values of x."
  assert entry.rest == (
    "Parameters x : list The numbers. See the guide for 2 * 3 and bold text"
    " here."
  )


def test_only_the_first_paragraph_is_cut_off(install):
  install(
    "fake_docs",
    {
      "cut.py": '''
def f():
  """One,
  two.
  \t
  Three.


  Four."""

def single():
  """One paragraph
  alone."""

def nothing_but_rules():
  """One.

  -------
  """

def none(): pass
'''
    },
  )
  entries = [(e.name, e.first, e.rest) for e in read()]
  assert entries == [("fake_docs.cut.f", "One, two.", "Three. Four.")]


def test_files_are_parsed_and_never_executed(install):
  source = f"raise RuntimeError('executed')\ndef f():\n  {TWO}\n"
  install("fake_docs", {"loud.py": source, "broken.py": "def ("})
  assert names() == ["fake_docs.loud.f"]
