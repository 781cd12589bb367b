"""The page. Everything that is not layout is in the other modules."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from ..config_rules import VERIFICATION_POLICIES
from ..decoding.policies.registry import THRESHOLD_POLICIES
from ..errors import DSparkError
from ..prompts import demo_prompts
from . import render
from .filled_in import OWN_POLICY, PLAIN, against_plain, drafters_request, race_request
from .race import readable
from .service import MAX_NEW_TOKENS, MAX_PROMPT_CHARACTERS, DemoService, RaceRequest, new_tally, rows_from
from .shelf import BUNDLED, DEFAULT_TARGET, UNTRAINED, Role
from .tally import LaneTally, RaceTally
from .visits import Visits
from .zero_gpu import Races

# Visitors who may wait; the next one is told to come back.
MAX_WAITING = 16

BATCH_SIZES = (2, 4, 8, 16)
MAX_DRAFTS = 16

# What the queue refuses and what fails outside a race look the same from here.
_DID_NOT_RUN = "Too many visitors are waiting, or the server has a fault; try again in a minute."

_CSS = Path(__file__).with_name("style.css")
_INTRO = """# DSpark: the same text in less time
A small drafter guesses several tokens, the model checks them all at once and keeps those that it would have said
itself. Nothing changes but the time."""
_RACE = "One prompt, twice. Both take turns on the device, so each one's seconds are its own."
_BATCH = "Several prompts at once. A scheduler decides for every row and round how many drafts are worth checking."
_DRAFTERS = "One prompt, two drafters. A poor drafter costs time; the text stays the same."


def launch_options() -> dict[str, Any]:
    """What belongs to `launch()`; system fonts, so that no page asks anybody for one, and no uploads."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = gr.themes.Default(primary_hue="green", **fonts)
    return {
        "css_paths": [_CSS],
        "theme": theme,
        "footer_links": [],
        "share": False,
        "ssr_mode": False,
        "max_file_size": 1,
    }


def build_demo(
    service: DemoService, *, target: str = DEFAULT_TARGET, drafter: str = BUNDLED, races: Races | None = None
) -> gr.Blocks:
    """The page, ready for `launch(**launch_options())`.

    Args:
        target, drafter: What is chosen at first.
        races: Runs races in place of `service.tallies`.
    """
    page = _Page(service, races or service.tallies)
    with gr.Blocks(title="DSpark", analytics_enabled=False) as demo:
        gr.Markdown(_INTRO)
        page.settings(target, drafter)
        with gr.Tabs():
            with gr.Tab("Race"):
                page.race_tab()
            with gr.Tab("Batch"):
                page.batch_tab()
            with gr.Tab("Two drafters"):
                page.drafters_tab(drafter)
        demo.unload(page.leave)
    return demo.queue(max_size=MAX_WAITING, default_concurrency_limit=1)


class _Page:
    """Components, and what happens when they are used."""

    def __init__(self, service: DemoService, races: Races) -> None:
        self._races = races
        self._visits = Visits()
        self._limits = service.shelf.limits
        self._examples = {prompt.id: prompt.messages[0]["content"] for prompt in demo_prompts()}
        self._settings: list[Any] = []  # the components that all tabs read
        self._target: Any = None
        self._drafter: Any = None

    # -- layout ---------------------------------------------------------------------------------------------------

    def settings(self, target: str, drafter: str) -> None:
        """What all tabs share."""
        with gr.Accordion("Settings: models, length, temperature, policy", open=False):
            with gr.Row():
                self._target = self._names("Target", "target", target, [DEFAULT_TARGET], "Hub id or folder")
                self._drafter = self._drafters("Drafter", drafter)
            with gr.Row():
                max_new = gr.Slider(8, MAX_NEW_TOKENS, 64, step=8, label="New tokens, at most")
                temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", info="0 is greedy")
            with gr.Row():
                policy = gr.Dropdown(
                    [OWN_POLICY, *VERIFICATION_POLICIES],
                    value=OWN_POLICY,
                    label="Policy",
                    info="How much of a draft is checked",
                )
                num_drafts = gr.Slider(
                    0, MAX_DRAFTS, 0, step=1, label="Drafts per round (gamma)", info="0: the drafter's own"
                )
                threshold = gr.Slider(
                    0, 1, 0.4, step=0.05, label="Threshold", info="Checks up to the first slot less sure", visible=False
                )
            policy.change(_shows_threshold, policy, threshold, queue=False, api_visibility="private")
        self._settings = [self._target, max_new, temperature, policy, num_drafts, threshold]

    def race_tab(self) -> None:
        """Plain against DSpark on one prompt."""
        gr.Markdown(_RACE)
        prompt = self._prompt()
        outputs = self._lanes(PLAIN, "DSpark", run="Race", elem="race")
        inputs = [prompt, self._drafter, *self._settings]
        self._connect("race", race_request, inputs, outputs)

    def drafters_tab(self, drafter: str) -> None:
        """Two drafters on one prompt."""
        gr.Markdown(_DRAFTERS)
        prompt = self._prompt()
        with gr.Row():
            one = self._drafters("Drafter A", drafter)
            other = self._drafters("Drafter B", UNTRAINED)
        outputs = self._lanes("A", "B", run="Compare", elem="drafters")
        self._connect("drafters", drafters_request, [prompt, one, other, *self._settings], outputs)

    def batch_tab(self) -> None:
        """Plain against DSpark on several prompts together."""
        gr.Markdown(_BATCH)
        size = gr.Radio(list(BATCH_SIZES), value=BATCH_SIZES[1], label="Batch size", info="Rows: the examples in turn")
        outputs = self._lanes(PLAIN, "DSpark", run="Run the batch", elem="batch", shows_text=False)
        self._connect("batch", self._batch_request, [size, self._drafter, *self._settings], outputs, shows_text=False)

    def _prompt(self) -> gr.Textbox:
        examples = list(self._examples.items())
        prompt = gr.Textbox(examples[0][1], label="Prompt", lines=2, max_lines=8, max_length=MAX_PROMPT_CHARACTERS)
        labels = [label for label, _ in examples]
        gr.Examples([[text] for _, text in examples], [prompt], example_labels=labels, label="Examples")
        return prompt

    def _names(self, label: str, role: Role, value: str, suggested: Sequence[str], info: str) -> gr.Dropdown:
        """A choice among names; of one's own too where any may be loaded."""
        allowed = self._limits.names(role)
        is_free = allowed is None
        choices = list(dict.fromkeys([value, *suggested] if allowed is None else allowed))
        return gr.Dropdown(
            choices, value=value, label=label, info=info if is_free else None, allow_custom_value=is_free
        )

    def _drafters(self, label: str, value: str) -> gr.Dropdown:
        info = f"{BUNDLED}, {UNTRAINED}, Hub id or folder"
        return self._names(label, "drafter", value, [BUNDLED, UNTRAINED], info)

    def _lanes(self, one: str, other: str, *, run: str, elem: str, shows_text: bool = True) -> list[Any]:
        """Buttons and places for what a race shows: run, stop, status, two lanes, results."""
        with gr.Row():
            run_button = gr.Button(run, variant="primary", size="lg", scale=4, elem_id=f"{elem}-run")
            stop = gr.Button("Stop", size="lg", scale=1, min_width=90, interactive=False, elem_id=f"{elem}-stop")
        status = gr.HTML(elem_id=f"{elem}-status")
        with gr.Row(elem_classes=["ds-lanes"] if shows_text else ["ds-lanes", "ds-batch"]):
            places = [
                gr.HTML(
                    render.lane(LaneTally(name, is_speculative=name != PLAIN), shows_text=shows_text),
                    elem_id=f"{elem}-lane-{number}",
                )
                for number, name in enumerate((one, other))
            ]
        results = gr.HTML(elem_id=f"{elem}-results")
        return [run_button, stop, status, *places, results]

    # -- what happens ---------------------------------------------------------------------------------------------

    def leave(self, request: gr.Request) -> None:
        """The visitor has closed the page."""
        self._visits.leave(str(request.session_hash))

    def _connect(
        self,
        tab: str,
        new_request: Callable[..., RaceRequest],
        inputs: list[Any],
        outputs: list[Any],
        *,
        shows_text: bool = True,
    ) -> None:
        """Run and stop buttons of a tab. All races share one place in the queue: the device."""
        run, stop, status = outputs[:3]

        def begin(request: gr.Request) -> tuple[Any, Any, str]:
            self._visits.begin(str(request.session_hash), tab)
            waiting = RaceTally([], notice="Waiting for the device …")
            return gr.Button(interactive=False), gr.Button(interactive=True), render.status(waiting)

        def race(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
            switch = self._visits.switch(str(request.session_hash), tab)
            view = partial(_view, shows_text=shows_text)
            yield from self._views(partial(new_request, *values), switch, view)

        def stop_race(request: gr.Request) -> None:
            self._visits.stop(str(request.session_hash), tab)

        begun = run.click(begin, None, [run, stop, status], queue=False, api_visibility="private")

        def give_back() -> tuple[Any, Any, str]:
            return gr.Button(interactive=True), gr.Button(interactive=False), _error(_DID_NOT_RUN)

        raced = begun.success(
            race,
            inputs,
            outputs,
            concurrency_limit=1,
            concurrency_id="device",
            show_progress="hidden",
            api_visibility="private",
        )
        raced.failure(give_back, None, [run, stop, status], queue=False, api_visibility="private")
        stop.click(stop_race, None, None, queue=False, api_visibility="private")

    def _views(
        self,
        new_request: Callable[[], RaceRequest],
        switch: threading.Event,
        view: Callable[[RaceTally, bool], tuple[Any, ...]],
    ) -> Iterator[tuple[Any, ...]]:
        """A race as values of the output components; the last one gives the run button back."""
        try:
            request = new_request()
        except DSparkError as error:
            yield (gr.Button(interactive=True), gr.Button(interactive=False), _error(readable(error)), *_UNCHANGED)
            return
        tally = new_tally(request)
        for tally in self._races(request, switch):
            yield view(tally, False)
        yield view(tally, True)

    def _batch_request(self, size: int, drafter: str | None, target: str | None, *settings: Any) -> RaceRequest:
        prompts = rows_from(list(self._examples.values()), int(size))
        return against_plain(prompts, drafter, target, *settings)


_UNCHANGED = (gr.skip(), gr.skip(), gr.skip())


def _view(tally: RaceTally, is_last: bool, *, shows_text: bool) -> tuple[Any, ...]:
    """Run, stop, status, two lanes and results."""
    results = render.results(tally)
    if not shows_text:
        results += render.budgets(tally.lanes[-1])
    return (
        gr.Button(interactive=True) if is_last else gr.skip(),
        gr.Button(interactive=False) if is_last else gr.skip(),
        render.status(tally),
        *(render.lane(one, shows_text=shows_text) for one in tally.lanes),
        results,
    )


def _error(message: str) -> str:
    return render.status(RaceTally([], error=message))


def _shows_threshold(policy: str) -> Any:
    return gr.Slider(visible=policy in THRESHOLD_POLICIES)
