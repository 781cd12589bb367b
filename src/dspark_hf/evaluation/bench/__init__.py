"""`dspark bench`: every way of generating on one target, interleaved, with what explains the numbers.

settings    what is measured: the main table, the batch sweep, the context sweep
ways        plain, static cache, sibling model, prompt lookup, drafters under policies; what cannot run, and why
inputs      prompts as batches; real text cut to a context length
runs        one batch through every way in turns: tokens, seconds, rounds, whether the texts agree
memory      bytes of weights and caches, and the process's peak, one way at a time
cells       finished measurements on disk, so that an interrupted run goes on
pooling     ratios with intervals, tau, forwards per token, time to the first token
latency     Eq. 1 from a profile against the measurement, and where the difference comes from
predictions which profile predicts which way
advice      which gamma pays on this machine; what a draft layer costs, and what it has to bring
layer_cost  what share of a draft a layer is
profiles    throughput profiles, found or measured
request     what is asked for, and the models
run         all of it, in order; `assemble` makes the report
report      what comes out; `tables`, `show` and `figures` show it
"""
