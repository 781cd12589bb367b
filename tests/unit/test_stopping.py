"""Where a round's tokens stop: each criterion on every new prefix, as plain generation asks it."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation import stopping_criteria as sc
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from dspark_hf.decoding.stopping import RowStops, StopChecker

CPU = torch.device("cpu")
TEXT = torch.tensor([[9, 8, 7, 1, 2, 3, 4, 5]])
NUM_NEW = 5  # 1 2 3 4 5


def scores_up_to(num_new):
    return tuple(f"scores after {i + 1}" for i in range(num_new))


def no_scores(rows, length):
    return None


def first_stop(*criteria, ids=TEXT, num_new=NUM_NEW):
    return StopChecker(StoppingCriteriaList(criteria)).first_stop(ids, num_new, scores_up_to)


def token_by_token(*criteria, ids=TEXT, num_new=NUM_NEW):
    """What plain generation does: ask all criteria after each token."""
    length = ids.shape[1] - num_new
    for kept in range(1, num_new + 1):
        if bool(StoppingCriteriaList(criteria)(ids[:, : length + kept], scores_up_to(kept)).all()):
            return kept, True
    return num_new, False


def eos(*ids):
    return sc.EosTokenCriteria(list(ids))


class Notes(StoppingCriteria):
    """Stops at a length, and notes what it was asked about."""

    def __init__(self, length=None):
        self.length = length
        self.asked = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids.tolist()[0], scores))
        return torch.tensor([input_ids.shape[1] == self.length])


CRITERIA = {
    "none": [],
    "end_token_first": [eos(1)],
    "end_token_inside": [eos(3)],
    "end_token_last": [eos(5)],
    "end_token_in_the_prompt_only": [eos(8)],
    "several_end_tokens": [eos(60, 4, 2)],
    "max_length_inside": [sc.MaxLengthCriteria(6)],
    "max_length_at_the_end": [sc.MaxLengthCriteria(8)],
    "max_length_not_reached": [sc.MaxLengthCriteria(9)],
    "max_length_of_the_prompt": [sc.MaxLengthCriteria(2)],
    "end_token_before_max_length": [eos(2), sc.MaxLengthCriteria(7)],
    "max_length_before_end_token": [eos(5), sc.MaxLengthCriteria(5)],
    "one_of_two_stops": [eos(60), sc.MaxLengthCriteria(7)],
    "custom_inside": [Notes(5)],
    "custom_last": [Notes(8)],
    "custom_before_end_token": [eos(4), Notes(5)],
    "custom_behind_end_token": [eos(2), Notes(7)],
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_block_stops_where_token_by_token_stops(name):
    assert first_stop(*CRITERIA[name]) == token_by_token(*CRITERIA[name])


def test_repeated_end_token_stops_at_its_first_use():
    ids = torch.tensor([[9, 3, 1, 3, 2, 3]])
    assert first_stop(eos(3), ids=ids, num_new=4) == (2, True)


def test_a_custom_criterion_sees_each_prefix_with_its_scores():
    plain, ours = Notes(7), Notes(7)
    token_by_token(plain)
    first_stop(ours)
    assert ours.asked == plain.asked
    assert len(ours.asked) == 4


def test_a_custom_criterion_sees_nothing_behind_an_end_token():
    criterion = Notes()
    assert first_stop(eos(2), criterion) == (2, True)
    assert [len(ids) for ids, _ in criterion.asked] == [4, 5]


def test_the_reminder_of_the_models_own_length_is_kept(monkeypatch):
    reminders = []
    monkeypatch.setattr(sc.logger, "warning_once", reminders.append)
    first_stop(sc.MaxLengthCriteria(20, max_position_embeddings=8))
    assert not reminders
    first_stop(sc.MaxLengthCriteria(20, max_position_embeddings=7))
    assert "maximum length (7)" in reminders[0]


# -- stop strings -------------------------------------------------------------------------------------------------

LETTERS = "abcdefghij"


@pytest.fixture(scope="module")
def tokenizer():
    """One token a letter, and `cd`: a string may be spelled by as many tokens as it has letters, or by fewer."""
    vocab = {token: i for i, token in enumerate([*LETTERS, "cd"])}
    backend = Tokenizer(models.BPE(vocab, [("c", "d")]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def spelled(text):
    return torch.tensor([[10 if token == "C" else LETTERS.index(token) for token in text]])  # C: the token `cd`


@pytest.mark.parametrize("stop", ["bcde", "de", "e", "cdef", "efgh", "jj"])
@pytest.mark.parametrize("text", ["bcdefghi", "jjjbcdefghi", "jjjbCefghi", "aaaaaaaaabcdef"])
@pytest.mark.parametrize("num_new", [1, 3, 5])
def test_stop_strings_in_texts_shorter_and_longer_than_the_window(tokenizer, stop, text, num_new):
    criterion = sc.StopStringCriteria(tokenizer, [stop])
    for end in range(num_new + 1, len(text) + 1):
        ids = spelled(text[:end])
        assert first_stop(criterion, ids=ids, num_new=num_new) == token_by_token(criterion, ids=ids, num_new=num_new)


def test_the_first_letter_of_a_stop_string_may_be_the_first_of_the_window(tokenizer):
    criterion = sc.StopStringCriteria(tokenizer, ["bcde"])
    assert criterion.maximum_token_len == 4
    assert first_stop(criterion, ids=spelled("aaabcdea"), num_new=2) == (1, True)


# -- several rows -------------------------------------------------------------------------------------------------


def test_end_tokens_of_rows_count_among_the_tokens_that_each_row_accepted():
    new = torch.tensor([[1, 2, 3, 4], [3, 1, 3, 1], [1, 1, 3, 3], [1, 1, 3, 1], [7, 1, 1, 1], [1, 1, 1, 3]])
    counts = torch.tensor([4, 4, 2, 3, 1, 4])
    for criteria in ([eos(3, 7)], [eos(3), eos(7)], [eos(7), eos(3)]):
        stops = RowStops(StoppingCriteriaList([*criteria, sc.MaxLengthCriteria(9)]), CPU)
        ends = stops.end_after(new, counts).tolist()
        assert ends[:2] == [3, 1]
        assert ends[2] > 4, "the end token stands among rejected drafts"
        assert ends[3:] == [3, 1, 4]
        assert not stops.asks_rows


def test_rows_without_an_end_token_end_nowhere():
    new = torch.tensor([[1, 2, 3]])
    for criteria in ([], [eos(9)]):
        assert RowStops(StoppingCriteriaList(criteria), CPU).end_after(new, torch.tensor([3])).tolist() == [4]


def test_of_each_row_only_what_needs_its_text_is_asked(tokenizer):
    criterion = sc.StopStringCriteria(tokenizer, ["bc"])
    stops = RowStops(StoppingCriteriaList([eos(2), criterion, sc.MaxLengthCriteria(3)]), CPU)
    assert stops.asks_rows
    ids = torch.cat([spelled("aaaabcd"), spelled("aaaabdc"), spelled("abcaaaa")])
    assert stops.first_stops(ids, [3, 3, 7], [4, 4, 0], no_scores) == [(3, True), (4, False), (0, False)]


def test_rows_of_equal_length_are_asked_together_and_none_behind_its_stop():
    asked = []

    class EndsOnSeven(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            asked.append(input_ids.tolist())
            return input_ids[:, -1] == 7

    stops = RowStops(StoppingCriteriaList([EndsOnSeven()]), CPU)
    assert stops.asks_rows
    ids = torch.tensor([[1, 7, 2, 0], [1, 2, 7, 3], [4, 5, 6, 8], [9, 9, 9, 9]])
    assert stops.first_stops(ids, [1, 1, 2, 4], [2, 3, 2, 0], no_scores) == [
        (1, True),
        (2, True),
        (2, False),
        (0, False),
    ]
    assert asked == [[[1, 7], [1, 2]], [[1, 2, 7], [4, 5, 6]], [[4, 5, 6, 8]]]
