"""Figures as PNG files that are small enough to travel with a drafter."""

import io
import os
from pathlib import Path
from typing import Any

# Diagrams have few; the rest are shades at the edges of letters and lines.
NUM_COLOURS = 64


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a matplotlib figure as a PNG of few colours, in one step.

    Raises:
        OSError: it cannot be written.
    """
    from PIL import Image  # comes with matplotlib

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    image = Image.open(drawn).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        image.save(partial, format="png", optimize=True)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
