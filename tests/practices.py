"""What people do with targets and drafters beside one call of generate(), each with the test that does it."""

from __future__ import annotations

from typing import NamedTuple


class Practice(NamedTuple):
    """`name` and `note` for readers; `test` is `file::function` below tests/integration."""

    name: str
    note: str
    test: str


PRACTICES = [
    Practice(
        '`pipeline("text-generation", model, assistant_model=drafter)`',
        "with chats, streamers and lists of prompts (batch size 1); pass the loaded drafter",
        "test_target_pipeline.py::test_a_pipeline_with_a_drafter",
    ),
    Practice(
        "a copied, pickled or reloaded drafter",
        "drafts the same",
        "test_target_sharing.py::test_another_of_the_same_drafter_drafts_the_same",
    ),
    Practice(
        "one drafter with two targets",
        "in turn, inside one another, in two threads: nothing of a call stays on it",
        "test_robustness.py::test_two_threads_share_a_drafter",
    ),
    Practice("two drafters with one target", "", "test_target_sharing.py::test_two_drafters_with_one_target_in_turn"),
    Practice(
        "`set_adapter()` and `adapter_names=` between calls",
        "",
        "test_target_adapters.py::test_switching_adapters_between_calls",
    ),
    Practice(
        "another library that wraps generate()'s methods",
        "in every order of install and uninstall",
        "test_route_hygiene.py::test_another_library_in_every_order",
    ),
    Practice(
        "a second copy of this package in the process",
        "remote code, a reload; drafters of both run through either",
        "test_route_hygiene.py::test_drafters_of_two_copies_run_through_either_wrapper",
    ),
    Practice(
        "child processes",
        "fork, spawn and forkserver",
        "test_route_hygiene.py::test_a_child_process_that_is_sent_a_drafter_speculates",
    ),
    Practice(
        "transformers upgraded",
        "what this package relies on is checked at import: one clear error, and transformers stays usable",
        "test_route_hygiene.py::test_a_class_that_transformers_has_moved_is_one_clear_error",
    ),
    Practice(
        "transformers' own assisted loop",
        "runs `DSparkCandidateGenerator`, losslessly",
        "test_stock_faults.py::test_the_stock_loop_runs_our_generator_losslessly",
    ),
]
