"""The real target answers real prompts: chat template, stop token, and the answers of plain generate."""

import json

import pytest
import torch

from dspark_hf import zoo
from dspark_hf.prompts import encode_prompt, quickstart_prompts
from dspark_hf.training.response_settings import ResponseSettings
from dspark_hf.training.responses import write_responses

pytestmark = pytest.mark.real_model

NAME = "smollm2-135m-instruct"
MAX_NEW = 16
GAP_LIMIT = 1e-4  # design rule 1: a first difference counts as agreement only below this top-2 logit gap


def test_greedy_answers_are_those_of_generate(tmp_path):
    target, tokenizer = zoo.load_target(NAME, dtype=torch.float32), zoo.load_tokenizer(NAME)
    prompts = quickstart_prompts()[:4]
    settings = ResponseSettings(temperatures=(0.0,), max_new_tokens=MAX_NEW, batch_size=3)
    output = tmp_path / "answers.jsonl"
    write_responses(target, tokenizer, prompts, output, settings, show_progress=False)
    rows = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert rows.keys() == {prompt.id for prompt in prompts}
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt)
        assert rows[prompt.id]["prompt_ids"] == ids[0].tolist()
        plain = target.generate(ids, do_sample=False, max_new_tokens=MAX_NEW)[0, ids.shape[1] :].tolist()
        answer = rows[prompt.id]["response_ids"]
        if answer != plain:
            first = next(i for i, (ours, theirs) in enumerate(zip(answer, plain, strict=False)) if ours != theirs)
            with torch.no_grad():
                logits = target(torch.tensor([rows[prompt.id]["prompt_ids"] + plain[:first]])).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] < GAP_LIMIT
