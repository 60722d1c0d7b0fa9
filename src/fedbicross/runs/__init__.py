"""Runs: configuration, storage, resuming, and the loop over seeds and methods."""
