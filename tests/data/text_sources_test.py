import json
import os
import stat
import tarfile
import zipfile

import pytest

from synthq_jax.data import open_text, text_sources


def source(name, **changes):
  fields = {
    "version": "1",
    "licence": "MIT",
    "files": (("**/*.md", "markdown"),),
  }
  return text_sources.Source(name=name, **fields | changes)


def test_files_are_read_in_the_order_of_their_names(tmp_path):
  for name in ("b.md", "a/c.md", "tests/d.md", "fr/e.md", "f.txt"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"# Title {path.stem}\n\nText.\n")
  found = list(text_sources.entries(source(f"folder:{tmp_path}"), "unused"))
  assert [e.title for e in found] == ["Title c", "Title b"]


def test_a_file_that_cannot_be_read_is_named_and_left_out(tmp_path, capsys):
  (tmp_path / "a.json").write_text("[1, 2")
  (tmp_path / "b.json").write_text('[{"qText": "who is it?"}]')
  files = (("*.json", "asked_json"),)
  one = source(f"folder:{tmp_path}", files=files)
  [entry] = text_sources.entries(one, "unused")
  assert entry == open_text.Entry("question", "who is it?", "")
  assert "cannot read a.json" in capsys.readouterr().out


def test_a_manifest_is_read_back(tmp_path):
  row = {"name": "sdist:x", "version": "2", "licence": "MIT",
         "files": [["*.py", "code"]]}  # fmt: skip
  (tmp_path / "m.json").write_text(json.dumps([row]))
  [made] = text_sources.manifest(tmp_path / "m.json")
  assert made == source("sdist:x", version="2", files=(("*.py", "code"),))


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"name": "http:x"}, "must start with github:"),
    ({"files": (("*", "word"),)}, "expected a reader among"),
  ],
)
def test_a_source_of_no_known_kind_is_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    source(changes.pop("name", "sdist:x"), **changes)


@pytest.fixture
def git(tmp_path, monkeypatch):
  """A git that writes a file where it should fetch, and says how it was called."""
  folder = tmp_path / "bin"
  folder.mkdir()
  script = folder / "git"
  script.write_text(
    '#!/bin/sh\necho "$@" >> "$LOG"\n'
    'case "$1" in init) mkdir .git;; checkout) echo "# A" > a.md;; esac\n'
  )
  script.chmod(script.stat().st_mode | stat.S_IEXEC)
  monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
  monkeypatch.setenv("LOG", str(tmp_path / "log"))
  return tmp_path / "log"


def test_a_repository_is_fetched_once_at_its_commit(git, tmp_path):
  one = source("github:some/where", version="abc123")
  for _ in range(2):
    folder = text_sources.fetch(one, tmp_path / "store")
  assert [p.name for p in folder.iterdir()] == ["a.md"]
  calls = git.read_text().splitlines()
  url = "https://github.com/some/where"
  assert calls[1] == f"fetch -q --depth=1 {url} abc123"
  assert len(calls) == 3


def test_a_failed_fetch_leaves_nothing_and_says_why(git, tmp_path):
  (tmp_path / "bin" / "git").write_text("#!/bin/sh\necho no such >&2\nexit 1")
  with pytest.raises(ValueError, match="git init -q... failed: no such"):
    text_sources.fetch(source("github:some/where"), tmp_path / "store")
  assert not list((tmp_path / "store").glob("*+*"))


@pytest.mark.parametrize("kind", ["sdist", "wheel", "debian"])
def test_a_package_is_fetched_and_unpacked(kind, tmp_path, monkeypatch):
  """Beside the lock of the folder that it is fetched into."""
  (tmp_path / "a.md").write_text("# A\n")

  def run(*command, folder):
    if "-x" in command:  # dpkg-deb
      (folder / "a.md").write_text("# A\n")
    elif kind == "sdist":
      with tarfile.open(folder / "x.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "a.md", "a.md")
    else:
      with zipfile.ZipFile(folder / "x.whl", "w") as packed:
        packed.write(tmp_path / "a.md", "a.md")

  monkeypatch.setattr(text_sources, "_run", run)
  folder = text_sources.fetch(source(f"{kind}:x"), tmp_path / "store")
  assert [path.name for path in folder.iterdir()] == ["a.md"]
