"""Fits and their quality: how well confidence predicts acceptance."""
