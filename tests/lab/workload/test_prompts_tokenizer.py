"""Tests tokenizer folders and chat templates, as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from schedsvc_lab.workload.chat import ChatTemplate, ChatTemplateError, plain_text
from schedsvc_lab.workload.tokenizers import ModelTokenizer, TokenizerError

MESSAGES = [
    {"role": "user", "content": "import the module"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "return"},
]


def config_of(folder: Path, tmp_path: Path, **changes: object) -> Path:
    """Return a copy of a folder with another configuration."""
    copy = tmp_path / "model"
    copy.mkdir()
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    return copy


def test_it_is_the_librarys_tokenizer(folders: dict[str, Path]) -> None:
    text = "def decode(self, ids): # naïve — 東京\n"
    for kind in ("bpe", "unigram"):
        known = Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
        loaded = ModelTokenizer.load(folders[kind])
        for special in (True, False):
            ids = known.encode(text, add_special_tokens=special).ids
            assert loaded.encode(text, special) == ids
            assert loaded.encode_many([text, "a"], special)[0] == ids
            assert loaded.count(text, special) == len(ids)
        assert loaded.vocab_size == known.get_vocab_size()
    assert ModelTokenizer.load(folders["bpe"] / "tokenizer.json").encode(text)
    assert (
        ModelTokenizer.load(folders["bpe"]).decode(ModelTokenizer.load(folders["bpe"]).encode(text))
        == text
    )


def test_content_without_text_is_counted_too(folders: dict[str, Path]) -> None:
    tokenizer = ModelTokenizer.load(folders["bpe"])
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a?b")


def test_nothing_is_cut_or_padded(folders: dict[str, Path], tmp_path: Path) -> None:
    cut = Tokenizer.from_file(str(folders["bpe"] / "tokenizer.json"))
    cut.enable_truncation(4)
    cut.enable_padding(length=8)
    cut.save(str(tmp_path / "tokenizer.json"))
    loaded = ModelTokenizer.load(tmp_path)
    assert loaded.count("self " * 100) >= 100
    assert len(loaded.encode("self")) == len(ModelTokenizer.load(folders["bpe"]).encode("self")) < 8


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"add_bos_token": True}, ["<s>"], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>"], ["</s>"]),
        ({"add_bos_token": False, "add_eos_token": True}, [], ["</s>"]),
        ({"add_bos_token": False}, [], []),
    ],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_configuration_decides_on_special_tokens(
    folders: dict[str, Path],
    tmp_path: Path,
    kind: str,
    changes: dict[str, bool],
    before: list[str],
    after: list[str],
) -> None:
    loaded = ModelTokenizer.load(config_of(folders[kind], tmp_path, **changes))
    number = Tokenizer.from_file(str(folders[kind] / "tokenizer.json")).token_to_id
    plain = loaded.encode("return self")
    wanted = [*map(number, before), *plain, *map(number, after)]
    assert loaded.encode("return self", add_special_tokens=True) == wanted


def test_a_conversation_by_its_template(folders: dict[str, Path]) -> None:
    tokenizer = ModelTokenizer.load(folders["unigram"])
    text = "<s>[user] import the module\n[assistant] done\n[user] return\n[assistant]"
    assert tokenizer.chat_text(MESSAGES) == text
    assert tokenizer.chat_text(MESSAGES, add_generation_prompt=False) == text[: -len("[assistant]")]
    ids = tokenizer.apply_chat_template(MESSAGES)
    # The template wrote the token that begins a text; no second one is added.
    assert ids == tokenizer.encode(text)
    assert ids.count(1) == 1
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.chat_text([*MESSAGES, MESSAGES[0]])


def test_a_conversation_without_template(folders: dict[str, Path]) -> None:
    text = "<user>\nimport the module\n<assistant>\ndone\n<user>\nreturn\n<assistant>\n"
    assert ModelTokenizer.load(folders["bpe"]).chat_text(MESSAGES) == text == plain_text(MESSAGES)


def test_where_templates_stand(folders: dict[str, Path], tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named {{ eos_token }}"},
    ]
    folder = config_of(folders["bpe"], tmp_path, chat_template=named)
    assert ModelTokenizer.load(folder).chat_text(MESSAGES) == "named </s>"
    (folder / "chat_template.jinja").write_text("its own file")
    assert ModelTokenizer.load(folder).chat_text(MESSAGES) == "its own file"


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{% for message in messages %}\n"
        "    {% generation %}\n{{ message | tojson }}{% endgeneration %}\n"
        "    {% break %}\n"
        "{% endfor %}\n"
        "{{ strftime_now is defined }} {{ missing }}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "né"}, MESSAGES[1]])
    assert text == '{"role": "user", "content": "né"}False '


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages[0].nothing.at_all }}", "{{ 1 / 0 }}"])
def test_a_broken_template_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_template_cannot_reach_out() -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError, match="the chat template fails"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_wrong_files_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json: no such file; give a folder that"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not a tokenizer: .*; give a folder"):
        ModelTokenizer.load(tmp_path)
    folder = config_of(folders["bpe"], tmp_path, add_bos_token=True, bos_token="<begin>")
    with pytest.raises(TokenizerError, match="bos_token '<begin>' is not in the vocabulary"):
        ModelTokenizer.load(folder)
    for wrong, why in (("{", "Expecting"), ("[]", "not a JSON object")):
        (folder / "tokenizer_config.json").write_text(wrong)
        with pytest.raises(TokenizerError, match=f"tokenizer_config.json: {why}"):
            ModelTokenizer.load(folder)
