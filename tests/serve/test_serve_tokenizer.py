from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.errors import ConfigurationError
from kvbaton.serve.bodies import BadRequest
from kvbaton.serve.tokenizer import TransformersTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs Transformers (extra: hf)")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


def save(folder: Path, template: str | None) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<eos>", "<unk>", *map(chr, range(32, 127))]
    raw = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(letters)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>")
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_text_there_and_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, None))
    assert tokenizer is not None
    token_ids = tokenizer.encode("hello world")
    assert len(token_ids) == 11
    assert all(type(each) is int for each in token_ids)
    assert tokenizer.decode([*token_ids, *tokenizer.eos_token_ids]) == "hello world"
    assert tokenizer.decode([*token_ids, *tokenizer.eos_token_ids], skip_special_tokens=False) == "hello world<eos>"


def test_chat(tmp_path: Path) -> None:
    tokenizer = TransformersTokenizer(save(tmp_path, TEMPLATE))
    token_ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(token_ids) == "<user>hi!"


@pytest.mark.parametrize("option", ["chat_template", "tokenize", "add_generation_prompt", "return_dict"])
def test_a_request_cannot_take_the_template_s_place(tmp_path: Path, option: str) -> None:
    tokenizer = TransformersTokenizer(save(tmp_path, TEMPLATE))
    with pytest.raises(BadRequest, match=option):
        tokenizer.chat([{"role": "user", "content": "hi"}], **{option: "x"})


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        TransformersTokenizer(save(tmp_path, None)).chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(str(tmp_path)) is None


def test_a_folder_with_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
