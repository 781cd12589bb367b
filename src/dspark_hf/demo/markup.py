"""Text of others inside our markup."""

from html import escape

# gradio fills components from templates: a value must not look like one of their placeholders.
_TEMPLATE_MARKS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escaped(text: str) -> str:
    """The text as HTML that shows it, also inside an attribute's quotes and inside a template."""
    return escape(text).translate(_TEMPLATE_MARKS)
