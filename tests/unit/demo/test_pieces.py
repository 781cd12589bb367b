"""Tokens as text, and what became of each draft of a round."""

import pytest
from demo_races import byte_tokenizer, word_tokenizer

from dspark_hf.demo.events import Piece
from dspark_hf.demo.pieces import Detokenizer, conditional, pieces_of_round


@pytest.mark.parametrize("text", ["plain words", "größer als 2 €, 日本語 and 🙂!", "\n\ttabs\n"])
def test_pieces_join_to_the_text_whatever_its_characters(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_words_keep_the_spaces_between_them():
    detokenizer = Detokenizer(word_tokenizer())
    assert [detokenizer.add(token) for token in (4, 9, 2)] == ["w4", " w9", " w2"]


def test_a_character_that_is_never_completed_is_shown_as_broken_and_blocks_nothing():
    tokenizer = byte_tokenizer()
    first_byte_of_many = tokenizer("é")["input_ids"][0]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(first_byte_of_many) for _ in range(4)]
    pieces += [detokenizer.add(token) for token in tokenizer("ok")["input_ids"]]
    assert pieces[3].endswith("\N{REPLACEMENT CHARACTER}")
    assert "".join(pieces).endswith("ok")


def test_a_rejected_draft_leaves_the_text_as_it_was():
    detokenizer = Detokenizer(word_tokenizer())
    detokenizer.add(4)
    assert detokenizer.would_add(7) == " w7"
    assert detokenizer.add(8) == " w8"


def round_of(new_ids, drafts, num_verified, num_accepted):
    confidences = [0.9, 0.8, 0.7, 0.6][: len(drafts)]
    text = Detokenizer(word_tokenizer())
    text.add(5)
    return pieces_of_round(text, new_ids, drafts, confidences, num_verified, num_accepted)


def test_accepted_rejected_and_own_in_reading_order():
    assert round_of([2, 3, 9], [2, 3, 4, 5], num_verified=4, num_accepted=2) == (
        Piece(" w2", "accepted", 1, 0.9),
        Piece(" w3", "accepted", 2, 0.8),
        Piece(" w4", "rejected", 3, 0.7, num_fallen=1),
        Piece(" w9", "own"),
    )


def test_nothing_is_rejected_where_all_that_was_verified_is_accepted():
    assert [piece.kind for piece in round_of([2, 9], [2, 3, 4], num_verified=1, num_accepted=1)] == ["accepted", "own"]
    assert [piece.kind for piece in round_of([9], [], num_verified=0, num_accepted=0)] == ["own"]


def test_a_stop_inside_the_drafts_leaves_out_what_was_cut_off():
    assert [piece.kind for piece in round_of([2], [2, 3, 4], num_verified=3, num_accepted=2)] == ["accepted"]
    assert [piece.kind for piece in round_of([2, 3], [2, 3, 4], num_verified=3, num_accepted=2)] == ["accepted"] * 2


def test_conditional_estimates_from_survival():
    assert conditional([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, None]
