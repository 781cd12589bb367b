"""What a speculative round costs beside its matrix work, on SmolLM2-135M-Instruct.

A round's seconds are split into the target's forward, the draft backbone, the head products of drafting (target head
and sequential head), and the rest: drawing, processors, acceptance, stop checks, roll-back, Python. The drafter is
untrained, and its drafts are verified in full: the cost of a round does not depend on how many drafts are right.

    python scripts/round_cost.py --dtype bfloat16 --draft-layers 5
"""

import argparse
import statistics
import time
from collections import defaultdict

import torch
from torch import nn

from dspark_hf import DSparkConfig, DSparkDraftModel, zoo
from dspark_hf.evaluation.intervals import bootstrap
from dspark_hf.prompts import encode_prompt, quickstart_prompts


class Stopwatch:
    """Wall seconds inside modules, by name; time inside a watched module's children counts for the outermost only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []

    def watch(self, module: nn.Module, name: str) -> None:
        def start(*_: object) -> None:
            self._inside.append(name)
            if len(self._inside) == 1:
                self._started_s = time.perf_counter()

        def stop(*_: object) -> None:
            self._inside.pop()
            if not self._inside:
                self.seconds[name] += time.perf_counter() - self._started_s

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()

    dtype = getattr(torch, arguments.dtype)
    target = zoo.load_target("smollm2-135m-instruct", dtype=dtype)
    tokenizer = zoo.load_tokenizer("smollm2-135m-instruct")
    torch.manual_seed(0)
    config = DSparkConfig.from_target(target.config, num_hidden_layers=arguments.draft_layers)
    drafter = DSparkDraftModel(config).to(dtype).eval()
    watch = Stopwatch()
    watch.watch(target, "target forward")
    watch.watch(drafter, "draft backbone")
    watch.watch(target.get_output_embeddings(), "draft head")
    watch.watch(drafter.markov_head.markov_w2, "sequential head")

    prompts = [encode_prompt(tokenizer, prompt) for prompt in quickstart_prompts()[: arguments.num_prompts]]
    print(f"SmolLM2-135M-Instruct, {arguments.dtype}, {torch.get_num_threads()} threads, gamma {config.block_size},")
    print(f"{config.num_hidden_layers} draft layers, rank {config.markov_rank}, {len(prompts)} prompts")
    for mode, options in (("greedy", {"do_sample": False}), ("temperature 1", {"do_sample": True, "top_k": 0})):
        run(mode, options, target, drafter, watch, prompts, arguments)


def run(mode, options, target, drafter, watch, prompts, arguments) -> None:  # noqa: ANN001
    common = {"assistant_model": drafter, "return_dict_in_generate": True, "eos_token_id": None, **options}
    target.generate(prompts[0], max_new_tokens=16, **common)
    rows = []
    for ids in prompts * arguments.repeats:
        watch.seconds.clear()
        report = target.generate(ids, max_new_tokens=arguments.max_new_tokens, **common).speculation
        parts = dict(watch.seconds)
        parts["target forward"] -= report.prefill_s  # the prompt's forward is not part of a round
        drafting_s = parts["draft backbone"] + parts["draft head"] + parts["sequential head"]
        parts["rest: drafting"] = report.draft_s - drafting_s
        parts["rest: verifying"] = report.verify_s - parts["target forward"]
        parts["rest: accepting"] = report.accept_s
        parts["rest: other"] = report.other_s
        parts["rest"] = sum(seconds for name, seconds in parts.items() if name.startswith("rest"))
        parts["round"] = report.total_s - report.prefill_s
        rows.append({name: 1e3 * seconds / report.num_rounds for name, seconds in parts.items()})
    print(f"\n{mode}: ms per round, median of {len(rows)} runs")
    for name in rows[0]:
        print(f"  {name:16s} {statistics.median(row[name] for row in rows):8.2f}")
    columns = {name: [row[name] for row in rows] for name in ("rest", "round")}
    share = bootstrap(columns, lambda sums: 100 * sums["rest"] / sums["round"], seed=0)
    print(f"  rest / round     {share.value:8.1f} %  (95 % interval {share.low:.1f} to {share.high:.1f})")


if __name__ == "__main__":
    main()
