"""The `dspark` command.

A package beside `dspark_hf`, since importing anything inside that imports torch and transformers: help and usage
errors come without that wait.
"""

import typer

from .ablate import ablate_command
from .bench import bench_command
from .calibrate import calibrate_command
from .card import card_command
from .compare import compare_command
from .convert import convert_command
from .demo import demo_command
from .doctor import doctor_command
from .evaluate import eval_command
from .profile import profile_command
from .push import push_command
from .simulate import simulate_command
from .traces import traces_command
from .train import train_app

app = typer.Typer(
    help="Lossless speculative decoding with DSpark drafters.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("ablate")(ablate_command)
app.command("bench")(bench_command)
app.command("calibrate")(calibrate_command)
app.command("card")(card_command)
app.command("compare")(compare_command)
app.command("convert")(convert_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.command("eval")(eval_command)
app.command("profile")(profile_command)
app.command("push")(push_command)
app.command("simulate")(simulate_command)
app.command("traces")(traces_command)
app.add_typer(train_app, name="train")


def main() -> None:
    """Entry point of the console script."""
    app()
