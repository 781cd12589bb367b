"""Several rows together: the loop of `loop.py` for rows that accept different numbers of tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .._compat import TargetModel
from ..modeling_dspark import DSparkDraftModel
from .accept import accept_greedy, accept_sampled
from .observers import RoundTeller
from .prefixes import Prefixes
from .report import GenerateDSparkOutput, SpeculationReport, StageClock, publish
from .row_drafter import RowDrafter
from .row_target import RowTarget
from .rows import join_steps
from .sampling import draw_uniforms, law, no_law_error
from .stopping import RowStops
from .types import Acceptance, Proposal, Verification
from .verify import last_logits

# Rows that have ended are taken out of the caches when they are this share of the rows.
COMPACT_SHARE = 0.25


@dataclass(eq=False)
class _Row:
    """One row in progress.

    Attributes:
        index: Its place in the result.
        num_text: Tokens of its text so far, padding of the prompt counted.
        num_real: The same, padding not counted.
        stopped_at: Where a criterion stopped it that is no end token; the row goes on if there are no end tokens, as
            in plain generation, until all have stopped.
    """

    index: int
    num_text: int
    num_real: int
    is_done: bool = False
    stopped_at: int | None = None
    report: SpeculationReport = field(default_factory=lambda: SpeculationReport(num_calls=1))
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class BatchRun:
    """One generation of several rows in progress.

    Args:
        input_ids: int64 `[rows, length]`, padded on the left.
        attention_mask: int64 `[rows, length]`, 0 where padded; None: no padding.
    """

    def __init__(
        self,
        model: TargetModel,
        drafter: DSparkDraftModel,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        warn_of_unusable: Callable[[], None],
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
    ) -> None:
        self._warn_of_unusable = warn_of_unusable
        num_rows, length = input_ids.shape
        mask = model_kwargs.get("attention_mask")
        self._is_real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        capacity = generation_config.max_length
        self._max_length = generation_config.max_length
        self._config = generation_config
        self._generator = RowDrafter(
            drafter, model, generation_config, logits_processor, model_kwargs, capacity, num_rows
        )
        self._target = RowTarget(model, capacity, self._generator.model_kwargs_overrides)
        self._stops = RowStops(stopping_criteria)
        self._do_sample = bool(generation_config.do_sample)
        num_real = self._is_real.sum(dim=1).tolist()
        self._rows = [_Row(r, length, num_real[r]) for r in range(num_rows)]  # those in the caches, in their order
        self._all_rows = list(self._rows)
        # One column more than any text needs, for what is not kept.
        self._texts = input_ids.new_zeros(num_rows, generation_config.max_length + 1)
        self._texts[:, :length] = input_ids
        self._ids = self._texts  # of the rows in the caches
        self.report = SpeculationReport()
        self._clock = StageClock(self.report)
        self._teller = RoundTeller()

    def run(self, input_ids: Tensor) -> GenerateDSparkOutput | Tensor:
        """Generate until every row has ended."""
        self._prompt(input_ids)
        while not self._is_over():
            self._compact()
            self._round()
        self._store(self._rows)
        self._cut()
        num_forwards = self.report.num_target_forwards
        for row in self._all_rows:
            self.report.merge(row.report)
        self.report.num_target_forwards = num_forwards  # of all rows together
        publish(self.report)
        return self._result()

    def _prompt(self, input_ids: Tensor) -> None:
        """Run the prompts and commit each row's first token, a round without a draft."""
        length = input_ids.shape[1]
        positions = (self._is_real.cumsum(dim=1) - 1).clamp(min=0)
        reached = (positions.amax(dim=0) + 1).tolist()  # columns in use up to each token
        size = self._config.prefill_chunk_size or length
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            outputs = self._target.forward(
                input_ids[:, part],
                positions[:, part],
                self._is_real[:, part],
                num_columns=reached[part.stop - 1],
                num_logits=1,
            )
            self.report.num_target_forwards += 1
            self._generator.observe_rows(outputs, positions[:, part], self._is_real[:, part])
        self._clock.mark("prefill_s")
        nothing = input_ids.new_zeros(len(self._rows))
        self._accept_and_commit(outputs, input_ids[:, :0], nothing, None)
        self._clock.mark("other_s")

    def _round(self) -> None:
        """One round of every row that has not ended."""
        # 1-3. draft, calibrate, schedule
        prefixes = self._prefixes()
        num_context = [row.num_real - 1 for row in self._rows]
        num_allowed = [0 if row.is_done else self._max_length - row.num_text - 1 for row in self._rows]
        proposal = self._generator.propose_rows(prefixes, num_context, num_allowed)
        drafts, lengths = self._scheduled(proposal)
        self._clock.mark("draft_s")
        # 4. verify
        width = drafts.shape[1]
        tokens = torch.cat([prefixes.last[:, None], drafts], dim=1)
        steps = torch.arange(width + 1, device=tokens.device)
        starts = torch.tensor(num_context, device=tokens.device)[:, None]
        positions = starts + torch.minimum(steps, lengths[:, None])
        is_live = torch.tensor([not row.is_done for row in self._rows], device=tokens.device)
        outputs = self._target.forward(
            tokens,
            positions,
            (steps <= lengths[:, None]) & is_live[:, None],
            num_columns=max(num_context) + width + 1,
            num_logits=width + 1,
        )
        self.report.num_target_forwards += 1
        self._clock.mark("verify_s")
        # 5. accept, and commit what no stop cuts off
        took_part = [row for row in self._rows if not row.is_done]
        num_kept, facts = self._accept_and_commit(outputs, drafts, lengths, proposal)
        self._count(took_part, proposal, facts)
        is_committed = steps < torch.tensor(num_kept, device=tokens.device)[:, None]
        self._generator.observe_rows(outputs, positions, is_committed)
        self._clock.mark("other_s")

    # -- parts of a round ---------------------------------------------------------------------------------------

    def _prefixes(self) -> Prefixes:
        lengths = tuple(row.num_text for row in self._rows)
        return Prefixes(self._ids, lengths, tuple(row.index for row in self._rows))

    def _scheduled(self, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """The drafts that go to verification, int64 `[rows, width]`, and how many of each row, int64 `[rows]`."""
        if proposal is None:
            return self._ids[:, :0], self._ids.new_zeros(len(self._rows))
        # Under `full` the width is known without asking the device.
        num_slots = proposal.block.tokens.shape[1]
        width = num_slots if self._generator.verifies_all else int(proposal.lengths.max())
        return proposal.block.tokens[:, :width], proposal.lengths

    def _accept_and_commit(
        self, outputs: Any, drafts: Tensor, lengths: Tensor, proposal: Proposal | None
    ) -> tuple[list[int], list[list[int]]]:
        """Tokens that each row keeps, none of one that has ended; and what was read from the device, by row."""
        raw = last_logits(outputs, drafts.shape[1] + 1, drafts.device)
        verification = Verification(raw, self._generator.processor.over_block(self._prefixes(), drafts, raw))
        acceptance = self._accept(drafts, lengths, proposal, verification)
        new = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
        new.scatter_(1, acceptance.num_accepted[:, None], acceptance.next_token[:, None])
        end_after = self._stops.end_after(new, acceptance.num_accepted + 1)
        # The round's only read from the device.
        num_usable = lengths if proposal is None else proposal.block.num_usable
        columns = [acceptance.num_accepted, acceptance.is_valid.long(), end_after, lengths, num_usable]
        facts: list[list[int]] = torch.stack(columns).tolist()
        self._clock.mark("accept_s")
        self._refuse_no_law(facts)
        num_kept = [0 if row.is_done else self._kept(r, facts, new, verification) for r, row in enumerate(self._rows)]
        self._append(new, num_kept)
        return num_kept, facts

    def _accept(
        self, drafts: Tensor, lengths: Tensor, proposal: Proposal | None, verification: Verification
    ) -> Acceptance:
        if not self._do_sample:
            return accept_greedy(drafts, verification.scores.argmax(dim=-1), lengths)
        rows, width = drafts.shape
        draft_probs = None if proposal is None else proposal.block.draft_probs
        return accept_sampled(
            drafts,
            None if draft_probs is None else draft_probs[:, :width],
            law(verification.scores),
            lengths,
            draw_uniforms(rows, width, device=drafts.device),
            draw_uniforms(rows, device=drafts.device),
        )

    def _refuse_no_law(self, facts: list[list[int]]) -> None:
        for row, num_accepted, is_valid in zip(self._rows, facts[0], facts[1], strict=True):
            if not is_valid and not row.is_done:
                raise no_law_error(row.num_text + num_accepted)

    def _kept(self, r: int, facts: list[list[int]], new: Tensor, verification: Verification) -> int:
        """How many of a row's new tokens stay; notes whether it has ended, and its scores."""
        row = self._rows[r]
        num_new = facts[0][r] + 1
        num_kept = num_allowed = min(num_new, facts[2][r], max(1, self._max_length - row.num_text))
        row.is_done = facts[2][r] <= num_new or row.num_text + num_kept >= self._max_length
        if self._stops.asks_rows:
            ids = torch.cat([self._ids[r : r + 1, : row.num_text], new[r : r + 1, :num_kept]], dim=1)
            scores = verification.scores[r : r + 1]
            num_kept, is_stopped = self._stops.first_stop(
                ids,
                num_kept,
                lambda n: (*row.scores, *scores[:, :n].unbind(1)) if self._wants("output_scores") else None,
            )
            if is_stopped and self._stops.has_end_tokens:
                row.is_done = True
            elif is_stopped:
                row.stopped_at = row.stopped_at or row.num_text + num_kept
                num_kept = num_allowed
        for name, source, kept_rows in (
            ("output_scores", verification.scores, row.scores),
            ("output_logits", verification.logits, row.logits),
        ):
            if self._wants(name):
                kept_rows.extend(step.clone() for step in source[r : r + 1, :num_kept].unbind(1))
        row.report.num_new_tokens += num_kept
        return num_kept

    def _is_over(self) -> bool:
        """Whether every row has ended; without end tokens, whether all have stopped and come as far as the last."""
        end = self._end()
        return all(row.is_done or (end is not None and row.num_text >= end) for row in self._rows)

    def _end(self) -> int | None:
        """Where the last row stopped, if there are no end tokens and all have stopped."""
        stops = [row.stopped_at or (row.num_text if row.is_done else None) for row in self._all_rows]
        stopped = [stop for stop in stops if stop is not None]
        return max(stopped) if not self._stops.has_end_tokens and len(stopped) == len(stops) else None

    def _wants(self, name: str) -> bool:
        return bool(self._config.return_dict_in_generate and getattr(self._config, name))

    def _append(self, new: Tensor, num_kept: list[int]) -> None:
        """Put the kept tokens behind the rows' texts."""
        steps = torch.arange(new.shape[1], device=new.device)
        starts = torch.tensor([row.num_text for row in self._rows], device=new.device)[:, None]
        is_kept = steps < torch.tensor(num_kept, device=new.device)[:, None]
        self._ids.scatter_(1, torch.where(is_kept, starts + steps, self._max_length), new)
        for row, kept in zip(self._rows, num_kept, strict=True):
            row.num_text += kept
            row.num_real += kept

    def _count(self, took_part: list[_Row], proposal: Proposal | None, facts: list[list[int]]) -> None:
        num_drafted = 0 if proposal is None else proposal.block.tokens.shape[1]
        places = [r for r, row in enumerate(self._rows) if row in took_part]
        accepted, verified = ([facts[i][r] for r in places] for i in (0, 3))
        self._teller.tell(proposal, places, [self._rows[r].index for r in places], verified, accepted)
        for row, num_accepted, length, num_usable in zip(self._rows, facts[0], facts[3], facts[4], strict=True):
            if row not in took_part:
                continue
            row.report.count_round(num_drafted, length, num_accepted)
            if proposal is not None and num_usable < num_drafted:
                self._warn_of_unusable()
                row.report.num_unusable_rounds += 1

    def _compact(self) -> None:
        """Take rows that have ended out of the caches, when they are enough to pay for the copy."""
        live = [r for r, row in enumerate(self._rows) if not row.is_done]
        num_done = len(self._rows) - len(live)
        if num_done < max(1, math.ceil(COMPACT_SHARE * len(self._rows))):
            return
        self._store(self._rows)
        kept = torch.tensor(live, device=self._ids.device)
        self._ids = self._ids[kept]
        self._target.keep(kept)
        self._generator.keep(kept)
        self._rows = [self._rows[r] for r in live]

    def _store(self, rows: list[_Row]) -> None:
        """Put the texts of the rows in the caches into the result."""
        if self._ids is not self._texts:
            self._texts[[row.index for row in rows]] = self._ids

    def _cut(self) -> None:
        """Without end tokens: forget what rows said behind the place where the last one stopped."""
        end = self._end()
        if end is None:
            return
        for row in self._all_rows:
            surplus = max(0, row.num_text - end)
            row.num_text -= surplus
            row.report.num_new_tokens -= surplus
            for steps in (row.scores, row.logits):
                del steps[max(0, len(steps) - surplus) :]

    def _result(self) -> GenerateDSparkOutput | Tensor:
        pad = getattr(self._config, "_pad_token_tensor", None)
        longest = max(row.num_text for row in self._all_rows)
        sequences = self._texts[:, :longest].clone()
        for row in self._all_rows:
            sequences[row.index, row.num_text :] = 0 if pad is None else int(pad)
        if not self._config.return_dict_in_generate:
            return sequences
        ids: Any = sequences  # transformers types it LongTensor
        return GenerateDSparkOutput(
            sequences=ids,
            scores=join_steps([row.scores for row in self._all_rows]) if self._wants("output_scores") else None,
            logits=join_steps([row.logits for row in self._all_rows]) if self._wants("output_logits") else None,
            cache=None,
            speculation=self.report,
        )
