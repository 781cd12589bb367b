"""Data sets by kind, as the paper's figures pool them."""

from collections.abc import Iterable

# By the part of a prompt's id before the slash, in lower case. The paper's nine, and some of their kin.
GROUPS: dict[str, tuple[str, ...]] = {
    "math": ("gsm8k", "math", "math500", "aime24", "aime25", "aime26"),
    "code": ("mbpp", "humaneval", "livecodebench", "lbpp"),
    "chat": ("mt-bench", "alpaca", "arena-hard", "arena-hard-v2"),
}
ALL = "all"


def group_of(data_set: str) -> str | None:
    """`math`, `code` or `chat`; None for a data set that is not known."""
    name = data_set.lower().replace("_", "-")
    return next((group for group, members in GROUPS.items() if name in members), None)


def groups_among(data_sets: Iterable[str]) -> dict[str, list[str]]:
    """Data sets by group: `all`, then the groups that are there."""
    names = list(dict.fromkeys(data_sets))
    found = {group: [name for name in names if group_of(name) == group] for group in GROUPS}
    return {ALL: names} | {group: members for group, members in found.items() if members}
