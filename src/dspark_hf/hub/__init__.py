"""Drafters on the Hub: what is fetched, what is pushed, and what can go wrong on the way."""
