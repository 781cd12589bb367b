"""What a running training shows, and how it stops without losing anything."""

import signal
import threading
import time
from types import FrameType
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import TrainingDataError


class TauProgress(TrainerCallback):
    """A progress bar with loss and expected tau, and a line for each evaluation."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", desc="training")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)
            self._bar.set_description("evaluating" if control.should_evaluate else "training")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.set_description("training")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._bar is None or logs is None:
            return
        if "loss" in logs:
            self._bar.set_postfix(loss=f"{logs['loss']:.3f}", tau=f"{logs.get('expected_tau', float('nan')):.2f}")
        if "eval_loss" in logs:
            taus = [
                f"{label} {logs[name]:.3f}"
                for label, name in (
                    ("expected tau", "eval_expected_tau"),
                    ("decoded tau greedy", "eval_tau_greedy"),
                    ("at temperature 1", "eval_tau_sampled"),
                )
                if name in logs
            ]
            self._bar.write(f"step {state.global_step}: held-out loss {logs['eval_loss']:.3f}, {', '.join(taus)}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class GracefulStop(TrainerCallback):
    """Ctrl-C ends training after the running step, with a checkpoint; a second one at once, without.

    In between, weights and optimiser may be of different steps; that is why the first one waits.
    """

    def __init__(self) -> None:
        self.was_interrupted = False
        self._previous: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.was_interrupted:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.was_interrupted:  # not one step more
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Give Ctrl-C back to whoever had it; training that ended with an error does not reach its end."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.was_interrupted:
            self.restore()
            raise KeyboardInterrupt
        self.was_interrupted = True
        tqdm.write("stopping after this step, with a checkpoint (Ctrl-C again: at once, without)")


class StopWhenBroken(TrainerCallback):
    """Ends training with an error once loss or weights are no numbers, before such weights replace a checkpoint."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        broken = {name: value for name, value in (logs or {}).items() if isinstance(value, float) and value != value}
        if broken.keys() & {"loss", "grad_norm"}:
            self._raise(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        weights = model.parameters() if control.should_save and model is not None else ()
        if not all(bool(weight.isfinite().all()) for weight in weights):
            self._raise(state)

    def _raise(self, state: TrainerState) -> None:
        raise TrainingDataError(
            f"training broke by step {state.global_step}: loss or weights are no numbers any more; the checkpoints "
            "before are whole. Start again with a smaller learning_rate, or in float32"
        )


class SpentTime(TrainerCallback):
    """Seconds of training over all runs of an output folder; a part of each checkpoint."""

    def __init__(self, already_spent_s: float, on_save: Any) -> None:
        self.spent_s = already_spent_s
        self._on_save = on_save
        self._since = time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._since = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.monotonic()
        self.spent_s += now - self._since
        self._since = now

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._on_save(self.spent_s)
