"""Answers on disk: both layouts in JSONL and Parquet, and what is wrong with a file, by file and row."""

import json

import pytest
import torch
from tiny import VOCAB

from dspark_hf.errors import TrainingDataError
from dspark_hf.training.records import TrainingSequence, data_digest, load_sequences, split_held_out

pytest.importorskip("datasets", reason="reading training data needs the extra dspark-hf[train]")

ROWS = [
    {"id": "a", "prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6, 7]},
    {"id": "b", "prompt_ids": [8], "response_ids": [9, 10]},
]
MASKED = [
    {"id": "m", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 0]},
    {"id": "n", "input_ids": [6, 7, 8], "loss_mask": [0, 1, 1]},
]


def write(path, rows):
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="datasets brings pyarrow")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(source, max_length=64):
    return load_sequences(source, vocab_size=VOCAB, max_length=max_length)


def shown(sequences):
    return [(s.id, s.input_ids.tolist(), s.loss_mask.int().tolist()) for s in sequences]


EXPECTED = [("a", [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1]), ("b", [8, 9, 10], [0, 1, 1])]
EXPECTED_MASKED = [("m", [1, 2, 3, 4, 5], [0, 0, 1, 1, 0]), ("n", [6, 7, 8], [0, 1, 1])]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_both_layouts_in_every_kind_of_file(tmp_path, suffix):
    for rows, expected in ((ROWS, EXPECTED), (MASKED, EXPECTED_MASKED)):
        sequences = load(write(tmp_path / f"data.{suffix}", rows))
        assert shown(sequences) == expected
        assert all(s.input_ids.dtype == torch.int64 and s.loss_mask.dtype == torch.bool for s in sequences)


def test_booleans_as_a_mask(tmp_path):
    rows = [row | {"loss_mask": [bool(x) for x in row["loss_mask"]]} for row in MASKED]
    for suffix in ("jsonl", "parquet"):
        assert shown(load(write(tmp_path / f"data.{suffix}", rows))) == EXPECTED_MASKED


def test_folders_and_lists(tmp_path):
    (tmp_path / "notes.txt").write_text("not data")
    second = write(tmp_path / "2.parquet", MASKED)
    first = write(tmp_path / "1.jsonl", ROWS)
    assert shown(load(tmp_path)) == shown(load(str(tmp_path))) == EXPECTED + EXPECTED_MASKED
    assert shown(load([second, str(first)])) == EXPECTED_MASKED + EXPECTED


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    load(path)
    write(path, MASKED)
    assert shown(load(path)) == EXPECTED_MASKED


def test_further_columns_are_left_alone(tmp_path):
    rows = [row | {"text": "hello", "turns": [{"role": "user"}]} for row in ROWS]
    assert shown(load(write(tmp_path / "data.jsonl", rows))) == EXPECTED


def test_rows_without_an_id_get_one_of_their_own(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "id"} for row in ROWS]
    assert [s.id for s in load(write(tmp_path / "data.jsonl", rows))] == ["data.jsonl/1", "data.jsonl/2"]
    numbered = [row | {"id": i} for i, row in enumerate(ROWS)]
    assert [s.id for s in load(write(tmp_path / "data.jsonl", numbered))] == ["0", "1"]


def test_long_rows_are_cut_and_rows_without_a_block_left_out(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    assert shown(load(path, max_length=5)) == [("a", [1, 2, 3, 4, 5], [0, 0, 0, 1, 1]), EXPECTED[1]]
    assert [s.id for s in load(path, max_length=4)] == ["b"]
    scattered = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0]}, MASKED[1]]
    assert [s.id for s in load(write(path, scattered))] == ["n"]


# -- what is wrong --------------------------------------------------------------------------------------------------


def refused(tmp_path, bad_row, suffix="jsonl", good=ROWS):
    """Message for a file whose third row is bad."""
    path = write(tmp_path / f"bad.{suffix}", [*good, bad_row])
    with pytest.raises(TrainingDataError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "row 3" in message
    return message


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": "x", "prompt_ids": [], "response_ids": [1, 2]}, "prompt_ids is empty"),
        ({"id": "x", "prompt_ids": [1], "response_ids": [VOCAB, 2]}, f"{VOCAB} is outside"),
        ({"id": "x", "prompt_ids": [-1], "response_ids": [1, 2]}, "-1 is outside"),
        ({"id": "x", "prompt_ids": [1], "response_ids": None}, "prompt_ids and response_ids"),
        ({"id": "x", "prompt_ids": [1]}, "prompt_ids and response_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_bad_rows_are_named(tmp_path, row, says, suffix):
    assert says in refused(tmp_path, row, suffix)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "3 entries and loss_mask 2"),
        ({"input_ids": [], "loss_mask": []}, "empty"),
        ({"input_ids": [1, 2, VOCAB + 5], "loss_mask": [0, 1, 1]}, f"{VOCAB + 5} is outside"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "loss_mask"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_masked_rows_are_named(tmp_path, row, says):
    assert says in refused(tmp_path, row, good=MASKED)


@pytest.mark.parametrize("value", ["text", [1.5, 2.0], ["a"], [[1], [2]], {"a": 1}, 7], ids=str)
def test_values_of_another_kind_are_named(tmp_path, value):
    path = write(tmp_path / "data.jsonl", [{"prompt_ids": value, "response_ids": [1, 2]}])
    with pytest.raises(TrainingDataError, match=r"row 1.*prompt_ids must be a list of integers") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_text_needs_to_be_answered_first(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": "hello", "response": "world"}])
    with pytest.raises(TrainingDataError, match=r"data.jsonl, row 1: needs the columns .*dspark train data"):
        load(path)


def test_a_row_of_another_kind_in_the_middle_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt_ids": "text", "response_ids": [1]}) + "\n")
    with pytest.raises(TrainingDataError, match="data.jsonl"):
        load(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl", b'{"prompt_ids": [1, 2], "response_ids": [3, 4]}\n{"prompt_ids": [1, 2'),
        ("binary.jsonl", bytes(range(256)) * 4),
        ("list.jsonl", b"[1, 2, 3]\n"),
        ("empty.jsonl", b""),
        ("empty.parquet", b""),
        ("cut.parquet", b"PAR1" + b"\0" * 40),
        ("text.parquet", b"hello"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingDataError, match=name):
        load(tmp_path / name)


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "data.parquet", ROWS * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrainingDataError, match=r"data\.parquet"):
        load(path)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(TrainingDataError, match=r"gone\.jsonl does not exist"):
        load(tmp_path / "gone.jsonl")
    with pytest.raises(TrainingDataError, match="gone does not exist"):
        load(tmp_path / "gone")
    with pytest.raises(TrainingDataError, match="holds no"):
        load(tmp_path)
    (tmp_path / "data.csv").write_text("id\n", encoding="utf-8")
    with pytest.raises(TrainingDataError, match="neither a folder nor"):
        load(tmp_path / "data.csv")
    with pytest.raises(TrainingDataError):
        load([])


def test_nothing_left_to_train_on(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(TrainingDataError, match=r"data\.jsonl.*nothing to train on"):
        load(path, max_length=2)


# -- split and digest -----------------------------------------------------------------------------------------------


def many(count=400):
    return [TrainingSequence(f"p{i // 2}", torch.tensor([1, i % 60]), torch.tensor([True, True])) for i in range(count)]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 1.0])
def test_the_split_follows_the_prompt(fraction):
    train, held_out = split_held_out(many(), fraction)
    ids = {s.id for s in train}, {s.id for s in held_out}
    assert not ids[0] & ids[1], "answers to one prompt must stay together"
    assert len(train) + len(held_out) == 400
    assert len(held_out) / 400 == pytest.approx(fraction, abs=0.05)
    again = split_held_out(reversed(many()), fraction)
    assert [{s.id for s in part} for part in again] == list(ids)


def test_a_larger_share_holds_the_smaller_one():
    small, large = ({s.id for s in split_held_out(many(), share)[1]} for share in (0.1, 0.3))
    assert small < large


def test_the_digest_sees_ids_masks_order_and_borders():
    base = [TrainingSequence("a", torch.tensor([1, 2]), torch.tensor([True, True]))]
    other = TrainingSequence("b", torch.tensor([3]), torch.tensor([True]))
    digests = [
        data_digest(base),
        data_digest([*base, other]),
        data_digest([other, *base]),
        data_digest([TrainingSequence("a", torch.tensor([1, 3]), torch.tensor([True, True]))]),
        data_digest([TrainingSequence("a", torch.tensor([1, 2]), torch.tensor([False, True]))]),
        data_digest([TrainingSequence("a", torch.tensor([1, 2, 3]), torch.tensor([True, True, True]))]),
    ]
    assert len(set(digests)) == len(digests)
    assert data_digest(base) == digests[0]
