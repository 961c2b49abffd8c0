"""Probes, comparisons and plots of runs."""
