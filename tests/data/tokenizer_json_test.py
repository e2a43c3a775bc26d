"""A vocabulary's tokenizer.json against Hugging Face's own library."""

import pytest
import small_vocabularies

from synthq_jax.data import shipped, tokenizer_json, vocabulary

tokenizers = pytest.importorskip("tokenizers")

TEXTS = (
  "",
  " ",
  "The unaffable  river,\trunning! ",
  "Cafés naïve Ångström façade",
  "日本語のテキスト 中文 한국어",
  "हिन्दी में एक प्रश्न",
  "a 😀 👩\u200d👩\u200d👧 b",
  "a\u0000b\u0007c\u001fd\u200be\ufeff",
  "½ ﬁne Ｆｕｌｌ ①",
  "</s> <pad> <extra_id_0> <unk>",
  "\u2581x \u2581\u2581 y",
)


def make(name, tmp_path):
  if name == "shipped":
    return shipped.VOCABULARY
  options = (
    {"byte_fallback": True, "vocab_size": 340} if name == "bytes" else {}
  )
  return small_vocabularies.write(
    tmp_path / "v.model", small_vocabularies.T5, **options
  )


@pytest.mark.parametrize("name", ["shipped", "small", "bytes"])
def test_odd_texts_have_the_ids_of_sentencepiece(name, tmp_path):
  path = make(name, tmp_path)
  words = vocabulary.load(path)
  tokenizer_json.write(tmp_path, path, rows=10**6, max_length=64)
  reader = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  for text in TEXTS:
    expected = [*words.encode(text), words.token_ids.eos]
    assert reader.encode(text).ids == expected, text
  tokenizer_json.write(tmp_path, path, rows=10**6, max_length=64, cut_at=5)
  reader = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert reader.encode("river " * 9).ids == [
    *words.encode("river " * 9)[:4], words.token_ids.eos
  ]  # fmt: skip
