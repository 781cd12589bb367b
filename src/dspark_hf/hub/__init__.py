"""Drafters that are shared: their cards.

card           a drafter's folder -> the text of its README.md
report_store   reports in a drafter's folder: read, checked, added
report_views   what a card shows of each kind of report
fields         typed access to JSON that somebody else may have written
markdown       texts from outside as Markdown, YAML and Python that say nothing else
template.md    the card's words
"""
