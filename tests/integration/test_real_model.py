"""SmolLM2-135M-Instruct in float32: greedy output of real prompts agrees with plain generate."""

from pathlib import Path

import pytest
import torch
from tiny import OracleDrafter

from dspark_hf import DSparkConfig, DSparkDraftModel, record_speculation, zoo
from dspark_hf.prompts import encode_prompt, load_prompts, quickstart_prompts

PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "eval"
# Fixed by id: twenty prompts over six kinds of task.
PROMPT_IDS = {
    "gsm8k": 4,
    "math500": 3,
    "humaneval": 4,
    "mbpp": 3,
    "mt-bench": 3,
    "arena-hard-v2": 3,
}
NUM_NEW = 64
GAP_LIMIT = 1e-4  # design rule 1: a first difference counts as agreement only below this top-2 logit gap
POLICIES = [
    {"verification_policy": "full"},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.3},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.9},
]

pytestmark = pytest.mark.real_model
needs_eval_prompts = pytest.mark.skipif(
    not PROMPTS.is_dir(), reason="needs the evaluation prompts of ../shared/data/prompts"
)


@pytest.fixture(scope="module")
def target():
    return zoo.load_target("smollm2-135m-instruct", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts():
    """`{id: int64 [1, length]}` in the target's chat template: those fixed by id, else the ones of the package."""
    tokenizer = zoo.load_tokenizer("smollm2-135m-instruct")
    chosen = quickstart_prompts()
    if PROMPTS.is_dir():
        chosen = [p for name, count in PROMPT_IDS.items() for p in load_prompts(PROMPTS / f"{name}.jsonl")[:count]]
        assert len(chosen) == 20
    return {prompt.id: encode_prompt(tokenizer, prompt) for prompt in chosen}


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Plain greedy output, made when first asked for."""
    made = {}

    def of(prompt_id):
        if prompt_id not in made:
            made[prompt_id] = target.generate(prompts[prompt_id], do_sample=False, max_new_tokens=NUM_NEW)[0]
        return made[prompt_id]

    return of


@pytest.fixture(scope="module")
def untrained(target):
    torch.manual_seed(0)
    # Wide weights: confidences then lie on both sides of the thresholds.
    config = DSparkConfig.from_target(target.config, num_hidden_layers=2, markov_rank=64, initializer_range=0.2)
    return DSparkDraftModel(config).eval()


def assert_agrees(target, drafter, ids, expected, **policy):
    """Token-identical, but for a near-tie of the target at the first difference; returns differing tokens (0 or 1)."""
    got = target.generate(
        ids,
        do_sample=False,
        max_new_tokens=NUM_NEW,
        assistant_model=drafter,
        return_dict_in_generate=True,
        **policy,
    )
    sequence = got.sequences[0]
    if torch.equal(sequence, expected):
        return got.speculation, 0
    shared = min(len(sequence), len(expected))
    first = int((sequence[:shared] != expected[:shared]).nonzero()[0])
    best = target(expected[None, :first]).logits[0, -1].topk(2).values
    assert float(best[0] - best[1]) < GAP_LIMIT, f"differs at token {first} where the target is sure"
    return got.speculation, 1


def oracle_for(target, expected, ids):
    return OracleDrafter.for_target(target, expected, hit_rate=0.7, seed=ids.shape[1])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(map(str, p.values())))
def test_subset_agrees(target, prompts, plain, untrained, policy):
    for prompt_id in list(prompts)[:2]:
        ids, expected = prompts[prompt_id], plain(prompt_id)
        report, _ = assert_agrees(target, oracle_for(target, expected, ids), ids, expected, **policy)
        if policy["verification_policy"] == "full":
            assert report.tau > 2
    assert_agrees(target, untrained, ids, expected, **policy)


@needs_eval_prompts
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(map(str, p.values())))
def test_twenty_prompts_agree(target, prompts, plain, untrained, policy):
    num_different = num_tokens = 0
    for prompt_id, ids in prompts.items():
        expected = plain(prompt_id)
        for drafter in (untrained, oracle_for(target, expected, ids)):
            num_different += assert_agrees(target, drafter, ids, expected, **policy)[1]
            num_tokens += len(expected) - ids.shape[1]
    assert num_different <= num_tokens / 10_000


def test_the_shipped_drafter_saves_forwards_and_changes_nothing(target, prompts, plain):
    """Two of three forwards at most, and the text of plain generation."""
    drafter = zoo.load_drafter("smollm2-135m-instruct", dtype=torch.float32)
    with record_speculation() as report:
        for prompt_id in list(prompts)[:3]:
            assert_agrees(target, drafter, prompts[prompt_id], plain(prompt_id))
    assert report.tau > 1.5
