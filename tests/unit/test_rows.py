"""Several rows: cutting arguments and processors by row, and putting results side by side."""

import pytest
import torch
from tiny import random_ids, tiny_target
from transformers import DynamicCache
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from dspark_hf import SpeculationReport, UnsupportedGenerationError
from dspark_hf._compat import CACHE_KEY
from dspark_hf.decoding.prefixes import Prefixes
from dspark_hf.decoding.report import GenerateDSparkOutput
from dspark_hf.decoding.row_processors import processors_for_rows
from dspark_hf.decoding.row_state import RowCounts
from dspark_hf.decoding.row_target import RowTarget
from dspark_hf.decoding.rows import join_rows, refuse_criteria, refuse_rows, split_rows
from dspark_hf.decoding.stopping import RowStops
from dspark_hf.model.row_slots import columns_to_see


def output(ids, hidden):
    """What one row returns: scores of one number a step, hidden states of two layers."""
    steps = range(len(hidden))
    return GenerateDSparkOutput(
        sequences=torch.tensor([ids]),
        scores=tuple(torch.tensor([[float(hidden[i])]]) for i in steps),
        hidden_states=tuple((torch.full((1, 1, 2), hidden[i]), None) for i in steps),
        speculation=SpeculationReport(num_calls=1, num_new_tokens=len(hidden)),
    )


def test_rows_of_different_length_stand_side_by_side():
    joined = join_rows([output([5, 6], [1.0]), output([5, 7, 8, 9], [2.0, 3.0, 4.0])], pad_token_id=0)
    assert joined.sequences.tolist() == [[5, 6, 0, 0], [5, 7, 8, 9]]
    assert [step.flatten().tolist() for step in joined.scores] == [[1, 2], [0, 3], [0, 4]]
    assert [step[0][:, 0, 0].tolist() for step in joined.hidden_states] == [[1, 2], [0, 3], [0, 4]]
    assert all(step[1] is None for step in joined.hidden_states)
    assert joined.logits is None and joined.cache is None
    assert (joined.speculation.num_calls, joined.speculation.num_new_tokens) == (2, 4)


def test_rows_of_plain_ids():
    joined = join_rows([torch.tensor([[1, 2, 3]]), torch.tensor([[1, 4]])], pad_token_id=9)
    assert joined.tolist() == [[1, 2, 3], [1, 4, 9]]


def test_arguments_are_cut_by_row_and_caches_are_not_shared():
    ids = torch.tensor([[1, 2], [3, 4]])
    kwargs = {
        "attention_mask": torch.tensor([[0, 1], [1, 1]]),
        "position_ids": torch.arange(12).view(3, 2, 2),
        "adapter_names": ["first", "second"],
        "use_cache": True,
        "shared": torch.arange(5),
        CACHE_KEY: DynamicCache(),
    }
    (first_ids, first), (second_ids, second) = split_rows(ids, kwargs)
    assert (first_ids.tolist(), second_ids.tolist()) == ([[1, 2]], [[3, 4]])
    assert (first["attention_mask"].tolist(), second["attention_mask"].tolist()) == ([[0, 1]], [[1, 1]])
    assert second["position_ids"].tolist() == [[[2, 3]], [[6, 7]], [[10, 11]]]
    assert (first["adapter_names"], second["adapter_names"]) == (["first"], ["second"])
    assert first["use_cache"] is True and torch.equal(second["shared"], torch.arange(5))
    assert len({id(each[CACHE_KEY]) for each in (first, second, kwargs)}) == 3


def test_processors_are_given_their_rows_part():
    seen = []
    processors = LogitsProcessorList(
        [
            lp.PrefixConstrainedLogitsProcessor(lambda prompt, ids: seen.append((prompt, ids.tolist())) or [0], 2),
            lp.RepetitionPenaltyLogitsProcessor(2.0, torch.tensor([0, 1, 2, 3])),
            lp.EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.tensor([[1], [2]])),
            lp.TemperatureLogitsWarper(2.0),
        ]
    )
    # two prompts, two sequences each; the third and the second row
    prefix, penalty, encoder, temperature = processors_for_rows(processors, [2, 1], num_rows=4, num_sequences=2)
    prefix(torch.tensor([[7], [8]]), torch.zeros(2, 3))
    assert seen == [(1, [7]), (0, [8])]
    assert penalty.prompt_ignore_length.tolist() == [2, 1]
    assert encoder.encoder_input_ids.tolist() == [[2], [1]]
    assert temperature is processors[3]
    assert processors[2].encoder_input_ids.tolist() == [[1], [2]]


def test_texts_of_several_lengths():
    prefixes = Prefixes(torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 0]]), torch.tensor([2, 1, 2]), (2, 1, 2), (0, 4, 6))
    assert prefixes.last.tolist() == [2, 3, 5]
    longer = prefixes.followed_by(torch.tensor([[7, 8], [7, 8], [7, 8]]))
    groups = [(index.tolist(), ids.tolist(), rows) for index, ids, rows in longer.groups()]
    assert groups == [([1], [[3, 7, 8]], (4,)), ([0, 2], [[1, 2, 7, 8], [4, 5, 7, 8]], (0, 6))]
    assert prefixes.lengths == (2, 1, 2)


def test_end_tokens_count_only_among_tokens_that_stand():
    stops = RowStops(
        StoppingCriteriaList([EosTokenCriteria(torch.tensor([5, 6])), EosTokenCriteria(torch.tensor([7]))]),
        torch.device("cpu"),
    )
    new = torch.tensor([[1, 5, 7], [1, 2, 5], [6, 5, 7], [1, 2, 7]])
    assert stops.end_after(new, torch.tensor([3, 2, 3, 3])).tolist() == [2, 4, 1, 3]
    assert not stops.asks_rows


def test_rows_cannot_share_encoded_images():
    with pytest.raises(UnsupportedGenerationError, match="images, videos or sounds"):
        refuse_rows(2, None, {"mm_encoder_outputs": object()})


def test_criteria_that_end_a_batch_together_are_refused_for_rows_that_run_one_by_one():
    end = EosTokenCriteria(torch.tensor([5]))
    refuse_criteria(StoppingCriteriaList([MaxLengthCriteria(9)]))
    refuse_criteria(StoppingCriteriaList([end, lambda ids, scores, **kwargs: ids[:, -1] == 3]))
    with pytest.raises(UnsupportedGenerationError, match="pass eos_token_id"):
        refuse_criteria(StoppingCriteriaList([lambda ids, scores, **kwargs: ids[:, -1] == 3]))
    with pytest.raises(UnsupportedGenerationError, match="max_time would be used up"):
        refuse_criteria(StoppingCriteriaList([end, MaxTimeCriteria(60.0)]))


def test_counts_of_rows_are_those_of_rounds_counted_one_by_one():
    rounds = [([0, 2], 3, [3, 1], [3, 0]), ([2], 3, [0], [0]), ([0, 1, 2], 2, [2, 2, 1], [0, 1, 1])]
    counts, expected = RowCounts(3, 3), [SpeculationReport(num_calls=1) for _ in range(3)]
    for rows, num_drafted, lengths, accepted in rounds:
        is_unusable = torch.tensor(lengths) < num_drafted
        counts.add_round(torch.tensor(rows), num_drafted, torch.tensor(lengths), torch.tensor(accepted), is_unusable)
        counts.add_tokens(torch.tensor(rows), torch.tensor(accepted) + 1)
        for row, length, num_accepted in zip(rows, lengths, accepted, strict=True):
            expected[row].count_round(num_drafted, length, num_accepted)
            expected[row].num_new_tokens += num_accepted + 1
            expected[row].num_unusable_rounds += length < num_drafted
    got = counts.reports()
    for row in range(3):
        for name in ("verified_per_slot", "accepted_per_slot", "reached_per_slot"):
            counted = getattr(expected[row], name)
            assert getattr(got[row], name) == counted + [0] * (3 - len(counted))
            setattr(expected[row], name, getattr(got[row], name))
    assert got == expected


@torch.no_grad()
def test_tokens_on_the_host_are_brought_to_the_target():
    target = RowTarget(tiny_target().to("meta"), 2, 8, {"output_hidden_states": [1]})
    positions = torch.tensor([[0, 1, 2], [0, 1, 1]])
    is_real = torch.tensor([[True, True, True], [True, True, False]])
    outputs = target.forward(random_ids(6).view(2, 3), positions, is_real, num_columns=3)
    assert outputs.logits.device.type == "meta"
    assert outputs.logits.shape == (2, 3, 61)


def test_an_accelerator_sees_columns_in_few_numbers_and_a_cpu_exactly_those_in_use():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [columns_to_see(n, 1000, cuda) for n in (1, 64, 65, 990)] == [64, 64, 128, 1000]
    assert [columns_to_see(n, 1000, cpu) for n in (1, 65, 1200)] == [1, 65, 1000]
