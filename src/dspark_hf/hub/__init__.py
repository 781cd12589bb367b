"""Drafters that are shared: what is fetched, what is pushed, what can go wrong on the way, and their cards.

faults         what huggingface_hub raises -> HubError
fetch          config and weights of a repository -> the cache, each file checked
files          what of a folder is shared
remote         a repository as it is now
publish        a folder -> the plan of a push -> one commit
push_drafter   a drafter in memory -> a folder -> the same
pushing        `push_to_hub` of drafters
remote_code    the code that may travel with a drafter
card           a drafter's folder -> the text of its README.md
report_store   reports in a drafter's folder: read, checked, added
report_views   what a card shows of each kind of report
fields         typed access to JSON that somebody else may have written
markdown       texts from outside as Markdown, YAML and Python that say nothing else
template.md    the card's words
"""
