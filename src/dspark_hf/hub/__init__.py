"""Drafters on the Hub: the code that may travel with them."""
