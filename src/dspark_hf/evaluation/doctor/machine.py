"""Checks of this machine: the throughput profile, what drafting can gain by it, measured speed, memory, bfloat16."""

import os
import time
from contextlib import suppress
from statistics import median
from typing import Any

import torch

from ..._machine import cache_root, cpu_has_bfloat16
from ...decoding.policies.registry import COST_POLICIES
from ...errors import DSparkError, ThroughputProfileError
from ...fitting.fingerprint import Fingerprint
from ...fitting.profile_store import command_for, load_profile, profile_path
from ...fitting.throughput import ThroughputProfile
from ..compare import compare
from ..settings import ComparisonSettings
from .case import Case
from .findings import Finding, NotExamined

# Prompts whose speed is measured.
MAX_SPEED_PROMPTS = 8
# Rows and repeats of the products that bfloat16 is timed on.
TIMED_ROWS = 256
TIMED_REPEATS = 5


def check_profile(case: Case) -> tuple[str, list[Finding]]:
    """Whether generate() finds a throughput profile of this pair on this machine, and whether it is fresh."""
    if case.misfit:
        raise NotExamined(case.misfit)
    expected = Fingerprint.of(case.target, case.drafter)
    path = profile_path(expected)
    if path.is_file():
        try:
            case.profile = load_profile(path, expected)
        except (ThroughputProfileError, OSError) as error:
            return "", [Finding(str(error), "certain: read off the file; generate() does not use it", _renew(case))]
        return f"of {case.profile.num_repeats} repeats, {path.name}", []
    policy = case.drafter.config.verification_policy
    others = _profiles_elsewhere(expected)
    if policy not in COST_POLICIES and not others:
        return f"none, and policy {policy} needs none", []
    what = "there is no throughput profile of this pair as it is loaded here"
    if policy in COST_POLICIES:
        what += f"; its policy {policy!r} gives way to 'full'"
    if others:
        what += f"; there is one with other {' and '.join(others)}"
    return "none", [Finding(what, "certain: looked for in the cache", _renew(case), is_fault=False)]


def _renew(case: Case) -> str:
    return command_for(case.target, case.drafter)


def _profiles_elsewhere(expected: Fingerprint) -> list[str]:
    """What differs in a profile of the same models that was measured under other conditions; of the nearest one."""
    nearest: list[str] | None = None
    for path in sorted((cache_root() / "profiles").glob("*.json")):
        with suppress(DSparkError, OSError):
            found = load_profile(path).fingerprint
            if (found.target, found.drafter) == (expected.target, expected.drafter):
                differing = [
                    f"{name} ({getattr(found, name)}, here {getattr(expected, name)})"
                    for name in ("device", "dtype", "layout", "num_threads")
                    if getattr(found, name) != getattr(expected, name)
                ]
                nearest = differing if nearest is None or len(differing) < len(nearest) else nearest
    return nearest or []


def check_payoff(case: Case) -> tuple[str, list[Finding]]:
    """What drafting gains by the profile: at the acceptance measured, and if every draft were accepted."""
    if case.profile is None:
        raise NotExamined("there is no profile of this pair on this machine")
    slots = case.measured.get("acceptance", {}).get("slots", [])
    acceptance = [slot["num_accepted"] / max(1, slot["num_reached"]) for slot in slots]
    context = case.profile.grid.contexts[0]
    rows = case.profile.grid.num_rows
    found = {
        n: {"here": _speed(case.profile, n, context, acceptance), "at_best": _speed(case.profile, n, context, None)}
        for n in rows
    }
    case.measured["payoff"] = {"context": context, "by_rows": found}
    behind = f"certain as the profile is: {case.profile.num_repeats} measurements a point, context {context}"
    told = ", ".join(f"{n} rows {one['here']:.2f}x" for n, one in found.items())
    never = [n for n, one in found.items() if one["at_best"] <= 1]
    not_here = [n for n, one in found.items() if one["here"] <= 1 and n not in never]
    findings = []
    if never:
        best = max(found[n]["at_best"] for n in never)
        findings.append(
            Finding(
                f"drafting cannot pay on this machine with {_rows(never)}: even if every draft were accepted it would "
                f"run at {best:.2f}x of plain generation",
                behind,
                "generate without assistant_model there, in another dtype or on another device; policy 'block' leaves "
                "drafting out by itself",
                is_fault=False,
            )
        )
    if not_here and acceptance:
        best = max(found[n]["here"] for n in not_here)
        findings.append(
            Finding(
                f"by the profile drafting does not pay with {_rows(not_here)} at the acceptance measured here: "
                f"{best:.2f}x of plain generation at best",
                f"{behind}; acceptance of {case.greedy.report.num_rounds} rounds",
                "use policy 'block', which leaves drafting out where it does not pay, or train the drafter longer",
                is_fault=False,
            )
        )
    return f"expected {told} of plain generation", findings


def _rows(rows: list[int]) -> str:
    return f"{', '.join(map(str, rows))} row{'s' if rows != [1] else ''}"


def _speed(profile: ThroughputProfile, rows: int, context: int, acceptance: list[float] | None) -> float:
    """Tokens a second of the best number of drafts over those of plain generation; None: all drafts are accepted."""
    costs = profile.step_costs(rows, context)
    num_slots = profile.grid.tokens_per_row[-1] - 1
    tau, survival, best = 1.0, 1.0, 0.0
    for k in range(num_slots):
        survival *= 1.0 if acceptance is None else acceptance[k] if k < len(acceptance) else 0.0
        tau += survival
        draft_s = costs.draft_s - (num_slots - 1 - k) * costs.slot_s
        round_s = draft_s + float(costs.step_s[rows * (k + 2)]) + profile.overhead_s(rows)
        best = max(best, tau / round_s)
    return best * profile.plain_step_s(rows, context)


def check_speed(case: Case) -> tuple[str, list[Finding]]:
    """Plain and speculative generation side by side, with the drafter's own policy; and whether the texts agree."""
    if not case.with_speed:
        raise NotExamined("--no-speed")
    if case.misfit:
        raise NotExamined(case.misfit)
    prompts = [prompt for prompt in case.prompts if prompt.id in case.encoded][:MAX_SPEED_PROMPTS]
    settings = ComparisonSettings(max_new_tokens=case.max_new_tokens, seed=case.seed)
    report = compare(case.target, case.drafter, case.tokenizer, prompts, settings)
    ratio = report.speed_ratio
    case.measured["speed"] = {
        "ratio": ratio,
        "policy": report.policy,
        "plain_tokens_per_s": report.plain_tokens_per_s,
        "dspark_tokens_per_s": report.dspark_tokens_per_s,
    }
    told = f"{ratio.value or 0:.2f}x of plain generation"
    if ratio.low is not None and ratio.high is not None:
        told += f" ({ratio.low:.2f} to {ratio.high:.2f}, {ratio.n} prompts)"
    findings = []
    if report.losslessness_errors:
        findings.append(
            Finding(
                f"{len(report.losslessness_errors)} of {ratio.n} greedy texts differ from plain generation where "
                "rounding cannot be the cause",
                "certain: compared token by token",
                "this is a bug in dspark_hf: please report it with `dspark compare --json`",
            )
        )
    if ratio.high is not None and ratio.high < 1:
        findings.append(
            Finding(
                f"with the drafter this machine generates more slowly: {told}",
                f"measured side by side, policy {report.policy}; 95 % interval over prompts",
                "`dspark profile`, then policy 'block', which leaves drafting out where it does not pay; where "
                "the time goes: `dspark compare`",
                is_fault=False,
            )
        )
    return told, findings


def check_memory(case: Case) -> tuple[str, list[Finding]]:
    """Bytes of weights and of caches by token, and what is free."""
    text = case.target.config.get_text_config(decoder=True)
    ours = case.drafter.config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    measured = {
        "target_weights_bytes": _weight_bytes(case.target),
        "drafter_weights_bytes": _weight_bytes(case.drafter),
        "target_cache_bytes_per_token": 2 * text.num_hidden_layers * kv_heads * head_dim * case.target.dtype.itemsize,
        "drafter_cache_bytes_per_token": 2
        * ours.num_hidden_layers
        * ours.num_key_value_heads
        * ours.head_dim
        * case.drafter.dtype.itemsize,
        "free_bytes": _free_bytes(case.target.device),
    }
    case.measured["memory"] = measured
    share = measured["drafter_weights_bytes"] / max(1, measured["target_weights_bytes"])
    caches = measured["target_cache_bytes_per_token"] + measured["drafter_cache_bytes_per_token"]
    detail = (
        f"weights {measured['target_weights_bytes'] / 1e6:.0f} MB + {measured['drafter_weights_bytes'] / 1e6:.0f} MB "
        f"({share:.0%}), caches {caches / 1e3:.1f} kB a token"
    )
    free, longest = measured["free_bytes"], ours.max_position_embeddings
    if free is None or caches * longest <= free:
        return detail, []
    return detail, [
        Finding(
            f"the caches of one text of {longest} tokens take {caches * longest / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
            "are free",
            "certain by the configs; what is free changes",
            "keep max_length shorter, or free memory",
            is_fault=False,
        )
    ]


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(ValueError, OSError, AttributeError):  # not every system tells
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def check_bfloat16(case: Case) -> tuple[str, list[Finding]]:
    """Whether a CPU computes bfloat16 itself: without instructions for it, products of several tokens are slow."""
    if case.target.device.type != "cpu" or case.target.dtype != torch.bfloat16:
        return "no bfloat16 on a CPU", []
    has_it = cpu_has_bfloat16()
    if has_it is None:
        raise NotExamined("this system does not tell what its CPU can do")
    if has_it:
        return "the CPU has instructions for bfloat16", []
    ratio = _bfloat16_over_float32(case.drafter.config.hidden_size)
    case.measured["bfloat16"] = {"has_instructions": False, "seconds_over_float32": ratio, "rows": TIMED_ROWS}
    detail = f"no instructions for bfloat16; {TIMED_ROWS} rows take {ratio:.1f} times as long as in float32"
    if ratio <= 1:
        return detail, []
    return detail, [
        Finding(
            "this CPU has no instructions for bfloat16 (AVX512-BF16, AMX or ARM's bf16), so it is emulated: prompts "
            "and the several tokens that a round verifies, are slow",
            f"certain by its flags; measured here: products of {TIMED_ROWS} rows take {ratio:.1f} times as long as in "
            f"float32, median of {TIMED_REPEATS}",
            "load the target in float32 if memory allows (--dtype float32), and profile that",
            is_fault=False,
        )
    ]


def _bfloat16_over_float32(size: int) -> float:
    """Median seconds of a product in bfloat16 over those in float32, taken in turns."""
    seconds: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
    operands: dict[torch.dtype, Any] = {
        dtype: (torch.ones(TIMED_ROWS, size, dtype=dtype), torch.ones(4 * size, size, dtype=dtype)) for dtype in seconds
    }
    for _ in range(TIMED_REPEATS + 1):
        for dtype, (rows, weight) in operands.items():
            start_s = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            seconds[dtype].append(time.perf_counter() - start_s)
    # The first of each warms up.
    return median(seconds[torch.bfloat16][1:]) / median(seconds[torch.float32][1:])
