import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc_lab.emulator.output import WORDS
from schedsvc_lab.emulator.tokenizer import VOCAB_SIZE, Tokenizer

tokenizer = Tokenizer()


@given(st.text())
def test_any_text_round_trips_and_counts_as_it_encodes(text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode("utf-8", "replace").decode()
    assert tokenizer.count(text) == len(ids)
    assert all(0 <= i < VOCAB_SIZE for i in ids)


@given(st.text(alphabet="abc xyz\nÄ€"), st.text(alphabet="ab z"))
def test_a_prefix_that_ends_at_a_word_is_a_prefix_of_the_tokens(first, second):
    ids = tokenizer.encode(f"{first} {second}")
    if first[-1:] != " ":
        assert ids[: tokenizer.count(first)] == tokenizer.encode(first)


@given(st.lists(st.sampled_from(WORDS)))
def test_a_word_is_a_token(words):
    assert tokenizer.count("".join(words)) == len(words)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The quick fox", ["T", "he", " quic", "k", " fox"]),
        ("a  b", ["a", " ", " b"]),
        ("ab1", ["ab", "1"]),
        ("", []),
    ],
)
def test_text_is_cut_into_words_of_four_letters(text, pieces):
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == pieces


def test_the_last_and_the_first_id_of_each_kind():
    assert tokenizer.decode([97]) == "a"
    assert tokenizer.decode([VOCAB_SIZE - 1]) == " zzzz"
    assert tokenizer.encode(" zzzz") == [VOCAB_SIZE - 1]
    assert tokenizer.encode("zzzz") == [256 + 475_253]
    assert tokenizer.encode(" a") == [256 + 475_254]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(ValueError, match="vocabulary size"):
        tokenizer.decode([token_id])


def test_messages_are_joined_with_their_roles():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = "<system>\nbe brief\n<user>\nhi\n<assistant>\n"
    assert tokenizer.chat_text(messages) == text
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(text)
