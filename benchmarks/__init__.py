"""Measurements of speed, kept out of the tests because no test should depend on a clock."""
