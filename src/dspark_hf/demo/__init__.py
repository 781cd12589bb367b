"""The demo: plain generation races DSpark in a browser.

events     what happens in a race, as plain data
turns      lanes take turns on the device
pieces     token ids -> text, and what became of each draft
lanes      one generate() call that tells of its rounds
race       lanes together, then whether their texts agree
shelf      target and drafters by name, kept between races, within limits
service    requests in, tallies out; errors as one line
tally      events added up
bars, render   tallies as HTML
filled_in  what a visitor filled in, as a request
ui         the page; the only module that imports gradio
"""
