"""Answers of the target: batches with refill, the mix of temperatures, files that survive, data sets of any layout."""

import json
import logging
import sys

import pytest
import torch
from filelock import FileLock
from tiny import VOCAB, greedy, random_ids, tiny_target
from transformers import MistralConfig, MistralForCausalLM

from dspark_hf.errors import TrainingDataError
from dspark_hf.prompts import Prompt
from dspark_hf.training import answering
from dspark_hf.training.answering import AnswerRequest, answer_requests, answer_seed
from dspark_hf.training.records import load_sequences
from dspark_hf.training.response_prompts import load_prompt_dataset
from dspark_hf.training.response_settings import ResponseSettings
from dspark_hf.training.response_writer import settings_path
from dspark_hf.training.responses import write_responses
from dspark_hf.training.responses_command import run_train_data
from dspark_hf.training.row_cache import can_refill

MAX_NEW = 14
STOPS = [5, 9, 11, 30]
SETTINGS = ResponseSettings(max_new_tokens=6, batch_size=3, max_prompt_tokens=20)


class LetterTokenizer:
    """One token a character; what it encodes is small enough for the tiny targets."""

    chat_template = None

    def __call__(self, text, return_tensors):
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[1 + ord(letter) % (VOCAB - 1) for letter in text]])}


def with_stops(target, stops=STOPS):
    target.generation_config.eos_token_id = stops
    target.generation_config.pad_token_id = 0
    return target


@pytest.fixture(scope="module")
def target():
    return with_stops(tiny_target(num_layers=2))


@pytest.fixture(scope="module")
def sliding_target():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return with_stops(MistralForCausalLM(config).eval())


def requests(temperatures, num=11):
    """Ragged prompts of 1 to 17 tokens, in no order."""
    return [
        AnswerRequest(str(i), tuple(random_ids(1 + 7 * i % 17, seed=i)[0].tolist()), t, answer_seed(0, str(i), t))
        for i, t in zip(range(num), temperatures * num, strict=False)
    ]


def answers(target, wanted, batch_size, max_new_tokens=MAX_NEW):
    made = list(answer_requests(target, wanted, max_new_tokens=max_new_tokens, batch_size=batch_size))
    assert len(made) == len(wanted)
    return {answer.request.id: answer.response_ids for answer in made}


def generated(target, request):
    ids = torch.tensor([request.prompt_ids])
    return tuple(greedy(target, ids, max_new_tokens=MAX_NEW)[0, ids.shape[1] :].tolist())


def prompts(*texts):
    return [Prompt(f"p{i}", ({"role": "user", "content": text},)) for i, text in enumerate(texts)]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def parquet_rows(path):
    import datasets

    return list(datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True))


def by_key(path):
    return {(row["id"], row["temperature"]): row["response_ids"] for row in rows_of(path)}


TEXTS = prompts("one", "a longer prompt", "x", "and one more", "yes", "no", "maybe so")


# --- answers in batches ----------------------------------------------------------------------


def test_greedy_answers_are_those_of_generate_wherever_rows_are_refilled(target):
    wanted = requests([0.0])
    expected = {request.id: generated(target, request) for request in wanted}
    lengths = {len(ids) for ids in expected.values()}
    assert len(lengths) > 2, "answers must finish at different times, or nothing is refilled mid-way"
    for batch_size in (1, 4, 32):
        assert answers(target, wanted, batch_size) == expected


def test_small_prefill_groups_give_the_same_answers(target, monkeypatch):
    wanted = requests([0.0, 1.0])
    expected = answers(target, wanted, 6)
    monkeypatch.setattr(answering, "PREFILL_TOKENS", 12)
    assert answers(target, wanted, 6) == expected


def test_sampled_answers_do_not_depend_on_their_neighbours(target):
    wanted = requests([0.7, 0.0, 1.5])
    alone = answers(target, wanted, 1)
    assert answers(target, wanted, 5) == alone
    assert answers(target, wanted[::-1], 4) == alone
    other_seed = [AnswerRequest(r.id, r.prompt_ids, r.temperature, r.seed + 1) for r in wanted]
    others = answers(target, other_seed, 5)
    changed = {r.id for r in wanted if others[r.id] != alone[r.id]}
    assert changed and all(wanted[int(i)].temperature > 0 for i in changed)


def test_sampled_first_tokens_follow_the_full_law_of_the_target(target):
    ids = tuple(random_ids(5)[0].tolist())
    num, temperature = 1500, 2.0
    wanted = [AnswerRequest(str(i), ids, temperature, answer_seed(0, str(i), temperature)) for i in range(num)]
    made = answers(target, wanted, num, max_new_tokens=1)
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in made.values()]), minlength=VOCAB)
    with torch.no_grad():
        logits = target(torch.tensor([ids])).logits[0, -1]
    distance = {t: float((counts / num - (logits / t).softmax(0)).abs().sum() / 2) for t in (temperature, 1.5)}
    assert distance[temperature] < 0.1 < distance[1.5]


def test_answers_end_with_the_stop_token_or_at_the_limit(target):
    made = answers(target, requests([0.0, 1.0]), 4)
    for tokens in made.values():
        assert not set(tokens[:-1]) & set(STOPS)
        assert tokens[-1] in STOPS or len(tokens) == MAX_NEW
    assert {tokens[-1] in STOPS for tokens in made.values()} == {True, False}


@pytest.mark.parametrize("stops", [None, 9])
def test_stop_tokens_may_be_one_or_none(stops):
    target = with_stops(tiny_target("llama", num_layers=1), stops)
    for tokens in answers(target, requests([0.0, 1.0], num=4), 3).values():
        assert len(tokens) == MAX_NEW or tokens[-1] == stops
        assert stops not in tokens[:-1]


def test_penalties_in_the_generation_config_do_not_bend_the_law(target, sliding_target):
    for model in (target, sliding_target):
        wanted = requests([0.0, 1.0], num=4)
        expected = answers(model, wanted, 4)
        model.generation_config.repetition_penalty = 5.0
        try:
            assert answers(model, wanted, 4) == expected
            assert model.generation_config.repetition_penalty == 5.0
        finally:
            model.generation_config.repetition_penalty = None


def test_sliding_windows_are_answered_without_refill(sliding_target, caplog):
    assert not can_refill(sliding_target)
    wanted = requests([0.0, 1.0], num=6)
    with caplog.at_level(logging.INFO):
        alone = answers(sliding_target, wanted, 1)
    assert "batches run until their longest answer is finished" in caplog.text
    assert answers(sliding_target, wanted, 4) == alone
    for request in wanted[::2]:
        assert alone[request.id] == generated(sliding_target, request)


def test_both_ways_to_answer_agree(target, monkeypatch):
    wanted = requests([0.0, 1.0], num=6)
    expected = answers(target, wanted, 4)
    monkeypatch.setattr(answering, "can_refill", lambda target: False)
    assert answers(target, wanted, 4) == expected


def test_out_of_memory_names_the_way_out(target, monkeypatch):
    def exhausted(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(answering._RefillingBatch, "_step", exhausted)
    with pytest.raises(TrainingDataError, match="smaller batch_size"):
        answers(target, requests([0.0]), 4)


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (1.0, 1.0)}, "temperatures"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"temperatures": (float("nan"),)}, "temperatures"),
        ({"temperatures": (0.001,)}, "from 0.01"),
        ({"shares": (1.0, 1.0)}, "3 positive numbers"),
        ({"shares": (1.0, 1.0, 0.0)}, "positive"),
        ({"answers_per_prompt": 4}, "at most the number of temperatures, 3"),
        ({"answers_per_prompt": 0}, "answers_per_prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_prompt_tokens": 2.5}, "max_prompt_tokens"),
        ({"batch_size": True}, "batch_size"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(arguments, message):
    with pytest.raises(TrainingDataError, match=message):
        ResponseSettings(**arguments)


def test_temperatures_are_mixed_by_their_shares():
    settings = ResponseSettings()
    assert settings.resolved_shares() == pytest.approx((0.7, 0.15, 0.15))
    chosen = [settings.temperatures_for(f"prompt {i}") for i in range(2000)]
    assert sum(temperatures == [0.0] for temperatures in chosen) / 2000 == pytest.approx(0.7, abs=0.03)
    two = ResponseSettings(answers_per_prompt=2)
    assert all(two.temperatures_for(f"prompt {i}")[0] == chosen[i][0] for i in range(50))
    assert all(len(set(two.temperatures_for(f"prompt {i}"))) == 2 for i in range(50))
    reseeded = ResponseSettings(seed=1)
    assert any(reseeded.temperatures_for(f"prompt {i}") != chosen[i] for i in range(50))
    assert ResponseSettings(temperatures=(0.5, 1.0)).resolved_shares() == (0.5, 0.5)
    assert ResponseSettings(temperatures=(0.0,)).resolved_shares() == (1.0,)
    assert ResponseSettings(temperatures=(0.0, 1.0), shares=(3, 1)).resolved_shares() == (0.75, 0.25)


# --- files -----------------------------------------------------------------------------------


def test_rows_hold_what_training_reads(target, tmp_path):
    output = tmp_path / "new folder" / "answers.jsonl"
    summary = write_responses(target, LetterTokenizer(), TEXTS, output, SETTINGS, show_progress=False)
    assert load_sequences(output, vocab_size=VOCAB, max_length=64)
    rows = rows_of(output)
    assert summary.num_answers == len(rows) == len(TEXTS)
    assert summary.num_response_tokens == sum(len(row["response_ids"]) for row in rows)
    assert summary.num_stopped == sum(row["response_ids"][-1] in STOPS for row in rows)
    assert summary.tokens_per_s > 0
    assert all(list(row) == ["id", "temperature", "prompt_ids", "response_ids"] for row in rows)
    texts = {prompt.id: prompt.messages[0]["content"] for prompt in TEXTS}
    for row in rows:
        assert row["prompt_ids"] == LetterTokenizer()(texts[row["id"]], "pt")["input_ids"][0].tolist()
        assert row["temperature"] in SETTINGS.temperatures
    settings = json.loads(settings_path(output).read_text())
    assert settings["identity"]["max_new_tokens"] == 6
    assert {"torch", "transformers", "dspark_hf"} <= set(settings["runs"][0]["versions"])
    assert settings["runs"][0]["chat_template"] == {"sha256": None, "thinking": "absent"}
    assert str(tmp_path) not in settings_path(output).read_text()


def test_parquet_is_written_and_extended(target, tmp_path):
    output = tmp_path / "answers.parquet"
    few = [Prompt("2024-01-31", TEXTS[0].messages), *TEXTS[1:4]]  # no date, though Parquet knows dates
    write_responses(target, LetterTokenizer(), few, output, SETTINGS, show_progress=False)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"answers.parquet", "answers.parquet.settings.json", ".answers.parquet.lock"}
    first = {row["id"]: row["response_ids"] for row in parquet_rows(output)}
    assert first.keys() == {prompt.id for prompt in few}
    again = write_responses(target, LetterTokenizer(), [*few, *TEXTS[4:]], output, SETTINGS, show_progress=False)
    assert (again.num_resumed, again.num_answers) == (4, 3)
    assert {path.name for path in tmp_path.iterdir()} == files
    rows = parquet_rows(output)
    assert len(rows) == 7 and first.items() <= {row["id"]: row["response_ids"] for row in rows}.items()


def test_an_interrupted_run_goes_on_and_ends_with_the_same_answers(target, tmp_path, monkeypatch, caplog):
    settings = ResponseSettings(max_new_tokens=6, batch_size=2, answers_per_prompt=2)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write_responses(target, LetterTokenizer(), TEXTS, whole, settings, show_progress=False)

    from dspark_hf.training import responses

    def interrupting(*args, **kwargs):
        for number, answer in enumerate(answer_requests(*args, **kwargs)):
            if number == 5:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(responses, "answer_requests", interrupting)
        with pytest.raises(KeyboardInterrupt):
            write_responses(target, LetterTokenizer(), TEXTS, cut, settings, show_progress=False)
    assert len(rows_of(cut)) == 5
    assert "5 of 14 answers" in caplog.text
    with cut.open("a") as file:
        file.write('{"id":"p0","temperature":0.0,"prompt_ids":[1')
    changed = ResponseSettings(max_new_tokens=6, batch_size=5, answers_per_prompt=2)
    summary = write_responses(target, LetterTokenizer(), TEXTS, cut, changed, show_progress=False)
    assert (summary.num_resumed, summary.num_answers) == (5, 9)
    assert "half an answer" in caplog.text
    assert by_key(cut) == by_key(whole) and len(rows_of(cut)) == 14
    assert len(json.loads(settings_path(cut).read_text())["runs"]) == 2


def test_a_whole_last_row_without_line_end_is_kept(target, tmp_path):
    output = tmp_path / "a.jsonl"
    write_responses(target, LetterTokenizer(), TEXTS[:2], output, SETTINGS, show_progress=False)
    output.write_text(output.read_text().rstrip("\n"))
    summary = write_responses(target, LetterTokenizer(), TEXTS[:3], output, SETTINGS, show_progress=False)
    assert (summary.num_resumed, summary.num_answers, len(rows_of(output))) == (2, 1, 3)


def test_a_damaged_row_in_the_middle_is_named_not_dropped(target, tmp_path):
    output = tmp_path / "a.jsonl"
    write_responses(target, LetterTokenizer(), TEXTS[:2], output, SETTINGS, show_progress=False)
    damaged = "{broken\n" + output.read_text()
    output.write_text(damaged)
    with pytest.raises(TrainingDataError, match="line 1 is no answer"):
        write_responses(target, LetterTokenizer(), TEXTS[:3], output, SETTINGS, show_progress=False)
    assert output.read_text() == damaged


def test_other_settings_and_other_prompts_are_refused(target, tmp_path):
    output = tmp_path / "a.jsonl"
    write_responses(target, LetterTokenizer(), TEXTS, output, SETTINGS, show_progress=False)
    before = output.read_bytes(), settings_path(output).read_bytes()
    with pytest.raises(TrainingDataError, match="max_new_tokens 6, now 7.*seed 0, now 3.*name another output"):
        write_responses(
            target, LetterTokenizer(), TEXTS, output, ResponseSettings(max_new_tokens=7, seed=3), show_progress=False
        )
    other = with_stops(tiny_target(num_layers=2, seed=1))
    with pytest.raises(TrainingDataError, match="other settings: target "):
        write_responses(other, LetterTokenizer(), TEXTS, output, SETTINGS, show_progress=False)
    swapped = prompts("another")
    with pytest.raises(TrainingDataError, match="another prompt of the id 'p0'"):
        write_responses(target, LetterTokenizer(), swapped, output, SETTINGS, show_progress=False)
    assert output.read_bytes() == before[0]
    settings_path(output).unlink()
    with pytest.raises(TrainingDataError, match="does not; name another output"):
        write_responses(target, LetterTokenizer(), TEXTS, output, SETTINGS, show_progress=False)


def test_a_full_disk_leaves_whole_rows(target, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])  # the settings, which name the command, are to fit
    resource = pytest.importorskip("resource")  # not on Windows
    output, many = tmp_path / "a.jsonl", prompts(*(18 * letter for letter in "abcdefghijklmnopqrstuvwxyz"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files end here as on a full disk: the write that crosses the limit is cut short, the next one fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(TrainingDataError, match="cannot be written.*finished answers are kept"):
            write_responses(target, LetterTokenizer(), many, output, SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    num_kept = len(rows_of(output))
    assert num_kept > 3
    summary = write_responses(target, LetterTokenizer(), many, output, SETTINGS, show_progress=False)
    assert (summary.num_resumed, len(rows_of(output))) == (num_kept, 26)


def test_prompts_that_cannot_be_answered_are_skipped_and_counted(target, tmp_path, caplog):
    class StrictTokenizer(LetterTokenizer):
        chat_template = "roles must alternate"

        def apply_chat_template(self, messages, **kwargs):
            if messages[0]["role"] == "tool":
                raise ValueError("no such role")
            return self(messages[0]["content"], "pt")

    odd = [Prompt("tool", ({"role": "tool", "content": "x"},)), Prompt("none", ())]
    given = [*odd, *prompts("fine", " ", "far too long for twenty tokens")]
    summary = write_responses(target, StrictTokenizer(), given, tmp_path / "a.jsonl", SETTINGS, show_progress=False)
    assert (summary.num_prompts, summary.num_answers) == (5, 1)
    assert (summary.num_skipped_unusable, summary.num_skipped_long) == (3, 1)
    assert "3 of 5 prompts are unusable" in caplog.text
    with pytest.raises(TrainingDataError, match="nothing to answer: 1 of 1 prompts are unusable"):
        write_responses(target, StrictTokenizer(), odd[:1], tmp_path / "b.jsonl", SETTINGS)
    assert not (tmp_path / "b.jsonl").exists()


def test_prompts_leave_room_for_the_answer_in_the_targets_positions(target, tmp_path):
    settings = ResponseSettings(max_new_tokens=1020, max_prompt_tokens=1000)
    with pytest.raises(
        TrainingDataError, match="longer than 4 tokens; check the data, or lower --max-new-tokens: .*1024 pos"
    ):
        write_responses(target, LetterTokenizer(), prompts("abcde"), tmp_path / "a.jsonl", settings)
    short = ResponseSettings(max_new_tokens=2, max_prompt_tokens=4)
    with pytest.raises(TrainingDataError, match="longer than 4 tokens; check the data, or raise --max-prompt-tokens$"):
        write_responses(target, LetterTokenizer(), prompts("abcde"), tmp_path / "a.jsonl", short)
    with pytest.raises(TrainingDataError, match="0 are longer than 4 tokens; check the data$"):
        write_responses(target, LetterTokenizer(), prompts(""), tmp_path / "a.jsonl", short)


def test_misuse_is_refused_before_anything_is_written(target, tmp_path):
    twice = [TEXTS[0], TEXTS[0]]
    with pytest.raises(TrainingDataError, match="two prompts have the id 'p0'"):
        write_responses(target, LetterTokenizer(), twice, tmp_path / "a.jsonl", SETTINGS)
    with pytest.raises(TrainingDataError, match="must end in .jsonl or .parquet"):
        write_responses(target, LetterTokenizer(), TEXTS, tmp_path / "a.txt", SETTINGS)

    class ForeignTokenizer(LetterTokenizer):
        def __call__(self, text, return_tensors):
            return {"input_ids": torch.tensor([[VOCAB]])}

    with pytest.raises(TrainingDataError, match="token id 61, outside"):
        write_responses(target, ForeignTokenizer(), TEXTS, tmp_path / "a.jsonl", SETTINGS)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingDataError, match="cannot be written"):  # before the target is looked for
        run_train_data("/absent/model", "absent.jsonl", tmp_path / "file" / "a.jsonl")
    with pytest.raises(TrainingDataError, match="absent.jsonl"):  # one source, not a list of letters
        run_train_data("/absent/model", str(tmp_path / "absent.jsonl"), tmp_path / "a.jsonl")
    with pytest.raises(TrainingDataError, match="cannot be written"):
        write_responses(target, LetterTokenizer(), TEXTS, tmp_path / "file" / "a.jsonl", SETTINGS)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


# --- data sets -------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"messages": [USER, REPLY]}, ["hi"]),
        ({"messages": [USER, REPLY, {"role": "user", "content": "so?"}]}, ["hi", "hello", "so?"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
        ({"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}, ["a"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}, ["part"]),
        ({"turns": ["first", "second"]}, ["first"]),
        ({"prompt": "p", "text": "t"}, ["p"]),
        ({"prompt": [USER]}, ["hi"]),
        ({"messages": None, "prompt": "p"}, ["p"]),
        ({"instruction": "do", "input": "this"}, ["do\n\nthis"]),
        ({"instruction": "do", "input": ""}, ["do"]),
        ({"question": "why?", "answer": "so"}, ["why?"]),
        ({"text": "t"}, ["t"]),
        # Rows without a prompt
        ({"text": " "}, []),
        ({"text": 5}, []),
        ({"prompt": None}, []),
        ({"turns": []}, []),
        ({"text": "half \ud83d"}, []),
        ({"messages": [REPLY]}, []),
        ({"messages": [{"role": "user", "content": None}]}, []),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, []),
        ({"conversations": "text"}, []),
    ],
)
def test_columns_of_common_data_sets(tmp_path, row, contents):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (prompt,) = load_prompt_dataset(path)
    assert [message["content"] for message in prompt.messages] == contents
    assert prompt.id == "data/1"
    assert all(message["role"] != "assistant" for message in prompt.messages[-1:])


def test_ids_are_kept_made_and_told_apart(tmp_path):
    rows = [
        {"id": "a", "text": "1"},
        {"question_id": 7, "text": "2"},
        {"task_id": "t/0", "text": "3"},
        {"id": None, "text": "4"},
        {"id": "a", "text": "other"},
        {"id": "a", "text": "1"},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n{broken\n")
    assert [prompt.id for prompt in load_prompt_dataset(path)] == ["a", "7", "t/0", "d/4", "a#2", "d/7"]
    assert [prompt.id for prompt in load_prompt_dataset([path, str(path)], max_prompts=2)] == ["a", "7"]


def test_files_of_every_kind_and_folders_of_them(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "json"}]))
    (tmp_path / "b.csv").write_text("question,answer\ncsv,x\n")
    (tmp_path / "c.txt").write_text("text\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.jsonl").write_text('{"prompt": "jsonl"}\n')
    (tmp_path / "README.md").write_text("not data")
    found = load_prompt_dataset(tmp_path)
    assert [prompt.messages[0]["content"] for prompt in found] == ["json", "csv", "text", "jsonl"]


def test_data_without_prompts_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "d.jsonl"
    path.write_text('{"chosen": "x", "score": 1}\n')
    with pytest.raises(TrainingDataError, match="columns chosen, score; a prompt needs one of the columns messages,"):
        load_prompt_dataset(path)
    path.write_text("{broken\n")
    with pytest.raises(TrainingDataError, match="no JSON object"):
        load_prompt_dataset(path)
    path.write_text("")
    with pytest.raises(TrainingDataError, match="holds no row"):
        load_prompt_dataset(path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(TrainingDataError, match="broken.json cannot be read"):
        load_prompt_dataset(tmp_path / "broken.json")
    with pytest.raises(TrainingDataError, match="does not exist"):
        load_prompt_dataset(tmp_path / "absent.jsonl")
    with pytest.raises(TrainingDataError, match="owner/name cannot be read"):
        load_prompt_dataset("owner/name")
    (tmp_path / "d.bin").write_text("")
    with pytest.raises(TrainingDataError, match="d.bin is no"):
        load_prompt_dataset(tmp_path / "d.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TrainingDataError, match="holds no .jsonl"):
        load_prompt_dataset(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TrainingDataError, match=r'needs datasets: pip install "dspark-hf\[train\]"'):
        load_prompt_dataset(tmp_path / "broken.json")


def test_two_runs_into_one_file_are_refused(target, tmp_path):
    output = tmp_path / "answers.jsonl"
    prompts = [Prompt("p", ({"role": "user", "content": "ab"},))]
    with FileLock(tmp_path / ".answers.jsonl.lock"), pytest.raises(TrainingDataError, match="another run is writing"):
        write_responses(target, LetterTokenizer(), prompts, output, SETTINGS, show_progress=False)
    assert not output.exists()
    assert write_responses(target, LetterTokenizer(), prompts, output, SETTINGS, show_progress=False).num_answers == 1
