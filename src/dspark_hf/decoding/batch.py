"""Several rows together: the loop of `loop.py` for rows that accept different numbers of tokens.

Rows stand where `row_state.py` says, on the device as well as for the host. Under policy `full` the device is read
once a round, at its end; policies that shorten drafts need a second read, since lengths decide shapes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .._compat import TargetModel
from ..model.row_attention import attending_by_rows
from ..modeling_dspark import DSparkDraftModel
from .accept import accept
from .prefixes import Prefixes
from .report import GenerateDSparkOutput, SpeculationReport, StageClock, publish
from .row_criteria import ask_criteria
from .row_drafter import RowDrafter
from .row_layout import Layout, LayoutChooser, padded_to
from .row_result import common_end, cut_rows, joined_result
from .row_rounds import RoundBook
from .row_state import Row, RowState
from .row_target import RowOutputs, RowTarget
from .sampling import no_law_error
from .stopping import RowStops
from .types import Proposal, Verification

# Rows that have ended are taken out of the caches when they are this share of the rows.
COMPACT_SHARE = 0.25


class BatchRun:
    """One generation of several rows in progress.

    Args:
        input_ids: int64 `[rows, length]`, padded on the left.
        streamer: For one row only.
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
        streamer: BaseStreamer | None = None,
    ) -> None:
        self._streamer = streamer
        self._model = model
        num_rows, length = input_ids.shape
        mask = model_kwargs.get("attention_mask")
        ones = torch.ones_like(input_ids, dtype=torch.bool)
        self._is_real = ones if mask is None else mask.to(device=ones.device, dtype=torch.bool)
        self._max_length: int = generation_config.max_length
        self._config = generation_config
        self._do_sample = bool(generation_config.do_sample)
        self._generator = RowDrafter(
            drafter,
            model,
            generation_config,
            logits_processor,
            model_kwargs,
            self._max_length,
            num_rows,
            ids_device=input_ids.device,
        )
        captured = self._generator.model_kwargs_overrides
        self._target = RowTarget.for_call(model, num_rows, captured, model_kwargs, generation_config)
        num_slots = self._generator.num_draft_tokens
        self._layouts = LayoutChooser(
            model,
            generation_config,
            is_compiled=self._target.is_compiled,
            num_slots=num_slots,
            verifies_all=self._generator.scheduler.verifies_all,
        )
        self._stops = RowStops(stopping_criteria, input_ids.device)
        self._state = RowState(input_ids.new_full((num_rows,), length), self._is_real.sum(dim=1))
        num_real = self._state.num_real.tolist()
        self._rows = [Row(r, length, num_real[r]) for r in range(num_rows)]  # those in the caches, in their order
        self._all_rows = list(self._rows)
        # One column more than any text needs, for what is not kept.
        self._texts = input_ids.new_zeros(num_rows, self._max_length + 1)
        self._texts[:, :length] = input_ids
        self._ids = self._texts  # of the rows in the caches
        self._book = RoundBook(num_rows, num_slots, self._generator, warn_of_unusable)
        self._report = SpeculationReport()  # of all rows together: seconds and forwards
        self._clock = StageClock(self._report)

    def run(self, input_ids: Tensor) -> GenerateDSparkOutput | Tensor:
        """Generate until every row has ended."""
        with attending_by_rows(self._model):
            self._prompt(input_ids)
            with self._model._optimize_model_for_decode():
                while not self._is_over():
                    self._compact()
                    self._round()
        if self._streamer is not None:
            self._streamer.end()
        return self._result()

    def _prompt(self, input_ids: Tensor) -> None:
        """Run the prompts and commit each row's first token, a round without a draft."""
        length = input_ids.shape[1]
        positions = (self._is_real.cumsum(dim=1) - 1).clamp(min=0)
        reached = (positions.amax(dim=0) + 1).tolist()  # columns in use up to each token
        num_real = self._is_real.sum(dim=0).tolist()
        size = self._config.prefill_chunk_size or length
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            is_real = self._is_real[:, part]
            outputs = self._target.prefill(
                input_ids[:, part],
                positions[:, part],
                is_real,
                num_columns=reached[part.stop - 1],
                num_flat=self._layouts.grid_of_prompts(is_real, sum(num_real[part])),
            )
            self._report.num_target_forwards += 1
            self._generator.observe_rows(outputs, positions[:, part], is_real)
        self._clock.mark("prefill_s")
        nothing = torch.zeros_like(self._state.num_text)
        self._accept_and_commit(outputs, input_ids[:, :0], nothing, None, is_round=False)
        self._clock.mark("other_s")

    def _round(self) -> None:
        """One round of every row that has not ended."""
        # 1-3. draft, calibrate, schedule
        state, prefixes = self._state, self._prefixes()
        num_context = state.num_real - 1
        room = torch.where(state.is_live, self._max_length - state.num_text - 1, 0)
        host_room = [0 if row.is_done else self._max_length - row.num_text - 1 for row in self._rows]
        max_context = max(row.num_real for row in self._rows) - 1
        is_live = [not row.is_done for row in self._rows]
        proposal = self._generator.propose_rows(
            prefixes,
            num_context,
            room,
            state.is_live,
            max_context=max_context,
            num_to_go={row.index: self._max_length - row.num_text for row in self._rows if not row.is_done},
        )
        lengths, shown, host_shown = self._scheduled(proposal, room, host_room)
        layout = self._layouts.choose(host_shown, is_live)
        drafts = padded_to(self._ids[:, :0] if proposal is None else proposal.block.tokens, layout.width)
        self._clock.mark("draft_s")
        # 4. verify
        steps = torch.arange(layout.width + 1, device=drafts.device)
        positions = num_context[:, None] + torch.minimum(steps, shown[:, None])
        outputs = self._target.forward(
            torch.cat([prefixes.last[:, None], drafts], dim=1),
            positions,
            (steps <= shown[:, None]) & state.is_live[:, None],
            num_columns=max_context + layout.width + 1,
            num_flat=layout.num_flat,
        )
        self._report.num_target_forwards += 1
        self._observe_step(self._clock.mark("verify_s"), layout, max_context)
        # 5. accept, and commit what no stop cuts off
        num_kept, kept = self._accept_and_commit(outputs, drafts, lengths, proposal, is_round=True)
        part = slice(0, max(kept))
        self._generator.observe_rows(outputs, positions[:, part], steps[part] < num_kept[:, None])
        self._clock.mark("other_s")

    # -- parts of a round ---------------------------------------------------------------------------------------

    def _observe_step(self, measured_s: float, layout: Layout, context: int) -> None:
        """Compare the step with the profile, which is of eager forwards."""
        if not self._target.is_compiled:
            num_rows = len(self._rows)
            num_tokens = layout.num_flat or num_rows * (1 + layout.width)
            self._generator.scheduler.observe_step(num_rows, num_tokens, context, measured_s)

    def _prefixes(self) -> Prefixes:
        rows = self._rows
        return Prefixes(
            self._ids, self._state.num_text, tuple(row.num_text for row in rows), tuple(row.index for row in rows)
        )

    def _scheduled(
        self, proposal: Proposal | None, room: Tensor, host_room: list[int]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Drafts of each row that are judged, and that are run, int64 `[rows]`; the latter also for the host."""
        if proposal is None:
            nothing = torch.zeros_like(room)
            return nothing, nothing, [0] * len(host_room)
        if self._generator.scheduler.verifies_all:
            # Known without asking the device; slots with broken numbers are run, and not judged.
            num_slots = proposal.block.tokens.shape[1]
            return proposal.lengths, room.clamp(max=num_slots), [min(num_slots, own) for own in host_room]
        return proposal.lengths, proposal.lengths, proposal.lengths.tolist()

    def _accept_and_commit(
        self, outputs: RowOutputs, drafts: Tensor, lengths: Tensor, proposal: Proposal | None, *, is_round: bool
    ) -> tuple[Tensor, list[int]]:
        """Tokens that each row keeps, none of one that has ended, int64 `[rows]` and for the host."""
        state = self._state
        raw = outputs.logits.to(dtype=torch.float32, device=drafts.device)
        verification = self._verification(raw, drafts, 0 if proposal is None else proposal.block.tokens.shape[1])
        probs = None if proposal is None else proposal.block.draft_probs
        draft_probs = None if probs is None else padded_to(probs, drafts.shape[1])
        acceptance = accept(drafts, draft_probs, verification.scores, lengths, do_sample=self._do_sample)
        new = torch.nn.functional.pad(drafts, (0, 1))
        new.scatter_(1, acceptance.num_accepted[:, None], acceptance.next_token[:, None])
        counts = acceptance.num_accepted + 1
        end_after = self._stops.end_after(new, counts)
        num_kept = torch.minimum(torch.minimum(counts, end_after), (self._max_length - state.num_text).clamp(min=1))
        num_kept = torch.where(state.is_live, num_kept, 0)
        ends = (end_after <= counts) | (state.num_text + num_kept >= self._max_length)
        # The round's only read from the device.
        num_usable = lengths if proposal is None else proposal.block.num_usable
        columns = [num_kept, ends, acceptance.num_accepted, acceptance.is_valid, lengths, num_usable]
        facts = torch.stack([column.long() for column in columns]).cpu()
        self._clock.mark("accept_s")
        self._refuse_no_law(facts)
        if is_round:
            self._book.add(self._rows, facts, proposal, acceptance)
        self._append(new, num_kept)
        if self._stops.asks_rows:  # sends what it changed to the device
            scores = verification.scores if self._wants("output_scores") else None
            is_alone = len(self._all_rows) == 1
            ask_criteria(self._stops, self._ids, self._rows, facts, scores, ends_at_once=is_alone)
            num_kept, ends = facts[0].to(num_kept.device), facts[1].bool().to(ends.device)
        self._state.advance(num_kept, ends)
        kept: list[int] = facts[0].tolist()
        self._note(facts, verification)
        return num_kept, kept

    def _verification(self, raw: Tensor, drafts: Tensor, num_slots: int) -> Verification:
        """Scores of what was drafted; places that only fill a compiled width are judged by nobody."""
        drafted = drafts[:, :num_slots]
        scores = self._generator.processor.over_block(self._prefixes(), drafted, raw[:, : drafted.shape[1] + 1])
        return Verification(
            raw, torch.cat([scores, raw[:, scores.shape[1] :]], dim=1) if num_slots < drafts.shape[1] else scores
        )

    def _refuse_no_law(self, facts: Tensor) -> None:
        for row, num_accepted, is_valid in zip(self._rows, facts[2].tolist(), facts[3].tolist(), strict=True):
            if not is_valid and not row.is_done:
                raise no_law_error(row.num_text + num_accepted)

    def _append(self, new: Tensor, num_kept: Tensor) -> None:
        """Put the kept tokens behind the rows' texts."""
        steps = torch.arange(new.shape[1], device=new.device)
        is_kept = steps < num_kept[:, None]
        places = torch.where(is_kept, self._state.num_text[:, None] + steps, self._max_length)
        self._ids.scatter_(1, places, new)

    def _note(self, facts: Tensor, verification: Verification) -> None:
        """Tell the host's rows what they keep and whether they have ended."""
        for r, (row, kept, has_ended) in enumerate(zip(self._rows, facts[0].tolist(), facts[1].tolist(), strict=True)):
            row.is_done = row.is_done or bool(has_ended)
            if self._wants("output_scores"):
                row.scores.extend(step.clone() for step in verification.scores[r : r + 1, :kept].unbind(1))
            if self._wants("output_logits"):
                row.logits.extend(step.clone() for step in verification.logits[r : r + 1, :kept].unbind(1))
            if self._streamer is not None:
                for token in self._ids[r, row.num_text : row.num_text + kept].cpu():
                    self._streamer.put(token[None])
            row.num_text += kept
            row.num_real += kept
        self._book.counts.add_tokens(torch.tensor([row.index for row in self._rows]), facts[0])

    def _is_over(self) -> bool:
        """Whether every row has ended; without end tokens, whether all have stopped and come as far as the last."""
        end = self._end()
        return all(row.is_done or (end is not None and row.num_text >= end) for row in self._rows)

    def _end(self) -> int | None:
        return None if self._stops.has_end_tokens else common_end(self._all_rows)

    def _wants(self, name: str) -> bool:
        return bool(self._config.return_dict_in_generate and getattr(self._config, name))

    def _compact(self) -> None:
        """Take rows that have ended out of the caches, when they are enough to pay for the copy."""
        live = [r for r, row in enumerate(self._rows) if not row.is_done]
        num_done = len(self._rows) - len(live)
        # A compiled forward would be compiled again for the rest.
        if self._target.is_compiled or num_done < max(1, math.ceil(COMPACT_SHARE * len(self._rows))):
            return
        self._store(self._rows)
        kept = torch.tensor(live, device=self._ids.device)
        self._ids = self._ids[kept]
        for part in (self._target, self._generator, self._state):
            part.keep(kept)
        self._rows = [self._rows[r] for r in live]

    def _store(self, rows: list[Row]) -> None:
        """Put the texts of the rows in the caches into the result."""
        if self._ids is not self._texts:
            self._texts[[row.index for row in rows]] = self._ids

    def _result(self) -> GenerateDSparkOutput | Tensor:
        self._store(self._rows)
        if (end := self._end()) is not None:
            cut_rows(self._all_rows, end, self._book.counts)
        by_row = self._book.counts.reports()
        num_forwards = self._report.num_target_forwards
        for row_report in by_row:
            self._report.merge(row_report)
        self._report.num_target_forwards = num_forwards  # of all rows together
        publish(self._report)
        return joined_result(self._texts, self._all_rows, self._config, self._report, by_row)
