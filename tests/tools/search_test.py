"""A finished run answers queries, on the screen and on a page."""

import dataclasses
import html
import http.client
import json
import re
import shutil
import socket
import threading
import urllib.parse

import made_up
import numpy as np
import pytest

from synthq_jax.cli import main
from synthq_jax.data import files
from synthq_jax.retrieval import fusion, trec
from synthq_jax.runtime import results, system_results
from synthq_jax.storage import artifacts
from synthq_jax.tools import export, search, search_page

FUSED = "fused_synthetic_eps8"


@pytest.fixture(scope="module")
def root(finished_run, tmp_path_factory):
  return finished_run.copy(tmp_path_factory.mktemp("searched"))


def queries(root):
  path = root / "private" / "prepare_data" / "queries.jsonl"
  return {line["_id"]: line["text"] for _, line in files.json_lines(path)}


@pytest.mark.parametrize(
  "name", ["bm25", "synthetic_eps8", "original", "adapter_eps8"]
)
def test_a_search_finds_what_the_evaluation_found(name, root):
  searcher = search.open_run(root, name, private=True)
  place = root / "private" / "evaluate" / "test" / name
  expected = trec.read_run(place / "run.trec")
  texts = queries(root)
  assert len(expected) > 5
  for query, scores in expected.items():
    hits = searcher.search(texts[query], 5)
    assert [hit.id for hit in hits] == trec.ranking(scores)[:5]
    np.testing.assert_allclose(
      [hit.score for hit in hits], list(scores.values())[:5], atol=1e-4
    )


def test_a_system_of_other_data_than_lie_there_is_not_searched(root, tmp_path):
  copy = tmp_path / "run"
  shutil.copytree(root, copy)
  place = copy / "train_retriever/synthetic_eps8" / artifacts.RESULT_NAME
  content = artifacts.read_json(place)
  assert content["data"] == artifacts.read_fingerprint(
    copy / "private/prepare_data"
  )
  content = artifacts.sealed(content | {"data": "of other settings"})
  place.write_text(json.dumps(content))
  with pytest.raises(ValueError, match="prepared with other settings"):
    search.open_run(copy, "synthetic_eps8")


def test_a_fused_search_weighs_what_both_systems_find(root):
  fused, *parts = (
    search.open_run(root, name) for name in (FUSED, "bm25", "synthetic_eps8")
  )
  made = artifacts.load(root / "fuse" / "synthetic_eps8", system_results.Fusion)
  for text in [*queries(root).values()][:10]:
    runs = (
      {"q": {h.id: h.score for h in part.search(text, 100)}} for part in parts
    )
    expected = fusion.fuse(*runs, weight=made.weight)["q"]
    hits = fused.search(text, 100)
    assert {h.id: h.score for h in hits} == pytest.approx(expected)
    assert [h.id for h in fused.search(text, 3)] == [*expected][:3]
    most = fused.search(text, 300)  # scaled by the first 100, too
    assert {h.id: h.score for h in most[: len(expected)]} == pytest.approx(
      expected
    )


def test_vectors_that_are_gone_are_not_searched(root, tmp_path):
  copy = tmp_path / "run"
  shutil.copytree(root, copy)
  assert search.open_run(copy, "untrained").search("otter", 2)
  assert not list(copy.rglob("*.faiss"))
  (copy / "encode_documents/untrained" / artifacts.RESULT_NAME).unlink()
  with pytest.raises(ValueError, match="run `synthq run` again"):
    search.open_run(copy, "untrained")


def test_what_is_made_of_synthetic_queries_is_searched_unless_told(
  root, tmp_path
):
  copy = tmp_path / "run"
  shutil.copytree(root, copy)
  for system in ("learn_to_rank", "fuse", "train_retriever"):
    found = search.open_run(copy)
    name = {"learn_to_rank": "ltr_", "fuse": "fused_"}.get(system, "")
    assert str(found.row) == f"{name}synthetic_eps8"
    shutil.rmtree(copy / system / "synthetic_eps8")
  assert search.open_run(copy).row == made_up.row("bm25")


def test_the_synthetic_queries_with_the_most_epsilon_are_searched():
  """The first by its name was: eps3 won against eps8."""
  named = ("bm25", "synthetic_eps3", "synthetic_eps8", "fused_synthetic_eps8")
  finished = [*map(made_up.row, named), made_up.row("synthetic_inf")]
  assert str(search._choose_row(finished)) == "fused_synthetic_eps8"
  finished.append(made_up.row("synthetic_eps16"))
  assert str(search._choose_row(finished)) == "synthetic_eps16"
  assert str(search._choose_row([made_up.row("bm25")])) == "bm25"


def test_weights_beside_an_earlier_training_are_not_applied(root, tmp_path):
  """It found, with old weights, what new vectors find; nor are old vectors."""
  copy = tmp_path / "run"
  shutil.copytree(root, copy)
  for row in (FUSED, "ltr_synthetic_eps8"):
    assert search.open_run(copy, row).search("row 3", 2)
  trained = copy / "train_retriever" / "synthetic_eps8" / artifacts.RESULT_NAME
  content = artifacts.read_json(trained)
  for entry in content["result"]["statement"]["ledger"]:
    entry["identifier"] = "drawn once more"
  trained.write_text(json.dumps(artifacts.sealed(content)))
  for row in (FUSED, "ltr_synthetic_eps8"):
    with pytest.raises(ValueError, match="another training of it"):
      search.open_run(copy, row)
  with pytest.raises(ValueError, match="those of an earlier training of it"):
    search.open_run(copy, "synthetic_eps8")


@pytest.mark.parametrize("name", ["public_only", "synthetic_eps8"])
def test_weights_of_a_retriever_trained_with_other_settings_are_refused(
  name, root, tmp_path
):
  """Its ledger stays as it was: nothing private entered this training."""
  copy = tmp_path / "run"
  shutil.copytree(root, copy)
  trained, encoded = (
    copy / stage / name for stage in ("train_retriever", "encode_documents")
  )
  artifacts.save(trained, artifacts.load(trained, results.Checkpoint), "other")
  vectors = artifacts.load(encoded, system_results.Vectors)
  vectors = dataclasses.replace(vectors, retriever="other")
  artifacts.save(encoded, vectors, artifacts.read_fingerprint(encoded))
  assert search.open_run(copy, name).search("row 3", 2)
  for row in (f"fused_{name}", f"ltr_{name}"):
    with pytest.raises(ValueError, match="another training of it"):
      search.open_run(copy, row)
  weights, to = copy / "learn_to_rank" / name, tmp_path / "never"
  with pytest.raises(ValueError, match="an earlier training of it"):
    export.run(weights, to, format="ranker")
  assert not to.exists()


def test_private_retrievers_need_a_flag(root, capsys):
  argv = ["search", f"--workdir={root}", "--system=original"]
  assert main.main([*argv, "otter"]) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert "got original; --private adds the private ones" in line
  assert main.main([*argv, "--private", "--k=2", "otter"]) == 0
  shown = capsys.readouterr().out
  assert shown.startswith("original:\n  1. ") and "otter" in shown


@pytest.mark.parametrize(
  "flags, words",
  [
    ([], "expected a query in quotes"),
    (["otter", "--serve"], "got both"),
    (["otter", "--system=bm26"], "expected --system among bm25, "),
    (["otter", "--k=0"], "expected --k of at least 1"),
    (
      ["--serve", "--port=70000"],
      "--port below 65536, got --k=10 --port=70000",
    ),
    (["otter \udcff"], "expected a query in UTF-8"),
    (["otter", "--workdir=nowhere"], "run `synthq run` first"),
  ],
)
def test_a_wrong_search_is_one_line(flags, words, root, capsys):
  argv = ["search", f"--workdir={root}", *flags]
  assert main.main(argv) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert words in line


@pytest.fixture
def page(root):
  searcher = search.open_run(root, "synthetic_eps8")
  server = search_page.make_server(searcher, port=0, k=3, private=False)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()

  def get(path, query=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    form = None if query is None else urllib.parse.urlencode({"q": query})
    connection.request("POST" if form else "GET", path, form, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text

  yield server, get
  server.shutdown()
  thread.join()
  server.server_close()


def test_the_page_shows_what_the_system_found(page, root, capfd):
  server, get = page
  assert server.server_address[0] == "127.0.0.1"
  answer, text = get("/", "otter of the harbor")
  assert answer.status == 200 and "synthetic_eps8" in text
  assert text.count("<li>") == 3 and "Private" not in text
  captured = capfd.readouterr()
  assert (
    "otter" not in captured.out + captured.err
  )  # what was asked is not kept
  assert not [q for q in queries(root).values() if q in text]


def test_the_page_offers_an_example_before_anything_was_asked(page, root):
  _, get = page
  for text in (get("/")[1], get("/", " ")[1]):
    assert "<h1>Search with retriever, synthetic queries</h1>" in text
    assert re.search(r"<p>This page searches \d+ documents", text)
    assert "<ol>" not in text and "Nothing" not in text
    assert "No document" not in text and "Private" not in text
    example = re.search(r'type="hidden" name="q" value="([^"]+)"', text)[1]
    assert f"<button>{example}</button>" in text
  assert html.unescape(example) not in queries(root).values()
  text = get("/", html.unescape(example))[1]
  assert text.count("<li>") == 3 and "For example" not in text


def test_an_example_is_a_title_or_the_first_words_of_a_text():
  documents = [{"title": "", "text": "a b"}, {"title": "C d", "text": "e"}]
  assert search_page._choose_example(documents) == "C d"
  assert search_page._choose_example(documents[:1]) == "a b"
  long = {"title": "", "text": " ".join("abcdefghij")}
  assert search_page._choose_example([long]) == "a b c d e f g h"
  assert search_page._choose_example([]) == ""


def test_a_query_that_finds_nothing_is_told_so():
  class Finding:
    row, documents = made_up.row("bm25"), ()

    def search(self, query, k):
      return []

  server = search_page.make_server(Finding(), port=0, private=False)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("POST", "/", "q=otter")
    assert "No document was found" in connection.getresponse().read().decode()
    connection.close()
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_connection_that_says_nothing_holds_nobody_up(page):
  server, get = page
  with socket.create_connection(("127.0.0.1", server.server_port)) as idle:
    assert get("/", "otter", Host="127.0.0.1")[0].status == 200  # as at port 80
    # One after the other, this one would have been given up before.
    idle.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert idle.recv(12).endswith(b"200")


def test_the_page_runs_nothing_and_answers_no_other_site(page):
  _, get = page
  answer, text = get("/", "<script>alert(1)</script>")
  assert "<script>" not in text and "&lt;script&gt;" in text
  assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
  assert get("/", Host="evil.example:80")[0].status == 403
  assert get("/private/prepare_data/queries.jsonl")[0].status == 404


def test_a_query_stands_in_no_address_and_no_other_site_posts_one(page):
  server, get = page
  form = re.search(r"<form[^>]*>", get("/")[1]).group()
  assert 'method="post"' in form and 'action="/"' in form
  assert get("/?q=otter")[0].status == 404
  answer, text = get("/", "otter of the harbor")
  assert "otter" not in re.search(r"<title>(.*)</title>", text).group()
  # Under "no-referrer" a browser says "null" of this page's own form, too.
  assert answer.headers["Referrer-Policy"] == "same-origin"
  own = f"http://127.0.0.1:{server.server_port}"
  assert get("/", "otter", Origin=own)[0].status == 200
  for other in ("http://evil.example", "null", f"{own}0"):
    answer, text = get("/", "otter", Origin=other)
    assert answer.status == 403 and "harbor" not in text
  assert get("/", "otter", Host="evil.example:80")[0].status == 403
  connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
  connection.putrequest("POST", "/")
  connection.putheader("Content-Length", str(1 << 20))
  connection.endheaders()
  assert connection.getresponse().status == 413
  connection.close()


def test_texts_of_documents_do_not_control_the_terminal():
  hit = search.Hit(
    id="d", score=1.0, title="a\x1b[31m\nred\x07", snippet="b\x1b]0;c\x9b"
  )
  said = search.describe(made_up.row("bm25"), [hit])
  assert (
    said == "bm25:\n  1. a\ufffd[31m red\ufffd  (1.000)\n     b\ufffd]0;c\ufffd"
  )
